"""What scripts of this folder share and the distribution does not need: peers, and the checks of a GPU."""
