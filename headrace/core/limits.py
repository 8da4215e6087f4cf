"""Limits: the most that one HTTP request may ask for, in one frozen object that every surface uses.

Each limit bounds work or memory that a single caller could otherwise make unbounded. What depends on the model (context
length, vocabulary) is not here: the engine reports it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int = 32 * 1024 * 1024
    max_messages: int = 4096  # in one chat
    max_prompts: int = 128  # in one completions request
    max_prompt_tokens: int = 1 << 20  # given as token ids; the context length is checked as well
    max_count: int = (1 << 31) - 1  # of tokens, and every token id: what a batch holds
    max_n: int = 128  # choices per prompt
    max_sequences: int = 256  # prompts times choices of one HTTP request
    max_logprobs: int = 20  # most likely alternatives per token
    max_stop: int = 16  # stop strings
    max_stop_length: int = 1024  # characters of one stop string
    max_stop_token_ids: int = 128
    max_logit_bias: int = 1024  # entries
    max_logit_bias_value: float = 100.0  # absolute
    max_user_length: int = 512  # characters of `user`, names and ids
    min_repetition_penalty: float = 0.01  # less would carry logits out of float32
    max_repetition_penalty: float = 10.0
    max_temperature: float = 100.0


LIMITS = Limits()
