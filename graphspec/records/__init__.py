"""What passes between the rooms: configuration, requests and their parameters, the plan of a launch and its answer,
what a user gets back. Frozen where it can be, without torch. It imports no other room and every room may import it.
Start with launch.py; the glossary is in docs/ARCHITECTURE.md.
"""
