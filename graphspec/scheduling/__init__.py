"""Decides what the next launch is, without torch and without waiting for the device: queues, slots, KV pages, how many
drafts. It imports records only; the engine imports it. Start with `Scheduler.next` and `Scheduler.commit` in
scheduler.py.
"""
