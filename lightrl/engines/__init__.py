"""Inference engines: token ids in; token ids, logprobs and versions out."""
