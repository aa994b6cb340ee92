"""Look at captured graphs: plan them, say what would spoil one, take one apart, check that it is right.

One file a subcommand. What knows nothing of language models is `graphs.debug`; here are the engine and its keys.
"""
