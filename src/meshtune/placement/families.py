"""Kinds of reasons for which a model family can't be trained, or not under some layouts.

Each is a section of docs/families.md, which every such refusal names: `see("experts")`.
"""

PAGE = "docs/families.md"

# Kind, the section's name -> what it means and what to do.
KINDS = {
    "not-built": "transformers can't build or train the model, or knows no causal one of its type.",
    "encoder": "An encoder-decoder: its loss needs a second sequence. meshtune trains decoders.",
    "causal": (
        "Tokens attend to later ones, so that the next token can be no label. Families that are encoders by "
        "default become decoders by `is_decoder: true` in their config.json."
    ),
    "media": "A model that also sees or hears, whose language part can't be told apart.",
    "parts": "Its embedding, a list of blocks that run one after the other, or its head is not found.",
    "attention": (
        "The family computes its attention itself, or gives it what no other function takes: a mask "
        "of its own, a pattern, a selection of tokens. It trains with `data.packing=false` and "
        "`model.attention=auto`, without cp."
    ),
    "experts": (
        "Its experts lie outside the MLP of its blocks, where tp does not find them. dp and ZeRO work; pp "
        "and cp where the row names them."
    ),
    "tensor": (
        "transformers has no tensor plan for the family, or one that leaves gradients undefined, or some of "
        "its layers are recurrent or convolutional, which are not cut. dp and ZeRO work."
    ),
    "stages": (
        "The body does more than hand hidden states from block to block, so the blocks can't run on several "
        "ranks. dp and ZeRO work."
    ),
    "context": "Recurrent and convolutional layers need tokens that cp gives to other ranks; leave cp out.",
}


def see(kind: str) -> str:
    """Return the sentence that ends a refusal of this kind."""
    assert kind in KINDS
    return f"See {PAGE}#{kind}."
