"""The text side of Kimi K2 and K2.5: tokenizer, prompt, and what comes back.

Everything here is our own code for the published formats; the model's data files stay with the checkpoint.
"""
