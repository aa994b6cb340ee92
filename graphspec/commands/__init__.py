"""The `graphspec` command: one file per subcommand, which everything else ignores. It may import all rooms. Start with
main.py.
"""
