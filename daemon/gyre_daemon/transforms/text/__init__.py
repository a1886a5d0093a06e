"""Transforms of text: tokens, and conversations with the tokens that count.

In: text in UTF-8, or JSON with text. Out: token ids, as the tokenizer's own library makes them.
Each library is imported when a chain needs it.
"""
