"""From logits to accepted tokens, pure on tensors and captured: logits processors, position-keyed sampling, verifying
drafts, log-probabilities, why a draft was rejected. It imports records only; drafting and execution import it. Start
with row_sampler.py.
"""
