"""Replay of traces against a live gateway, with text that shares what the trace says is shared.

A trace in Mooncake's format holds no text: only lengths, and hash ids of prefix blocks. Here each id becomes
words that are one token each, and what the chat template puts before them is measured through the API and
left out of the first block, so that blocks of the trace begin where blocks of the engine begin.
"""
