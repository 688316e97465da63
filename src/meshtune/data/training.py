"""Change a chat template so that it writes every assistant turn as it writes the last one.

Templates of reasoning models leave thoughts out of what was said before, so the answer that a model gave in
an earlier turn is not the one that stands there. The changed template is equal to the original for every
conversation that ends with its only assistant turn, and keeps what was said before as it was generated.
"""

import re

from transformers import PreTrainedTokenizerBase

from meshtune.data.limits import render_limit
from meshtune.data.probe import ANSWER, QUESTION
from meshtune.errors import UserError

# Each rule: a pattern in the source of a template, and what stands there in the changed one.
RULES: tuple[tuple[str, str], ...] = (
    # Qwen3, 3.5 and 3.6, GLM-4.5, Gemma 4, LFM2.5: thoughts are written after the last user turn only.
    (r"loop\.index0 > \w+\.last_(?:query|user)_(?:index|idx)\b", "true"),
    # Nemotron 3: the same, the other way round.
    (r"loop\.index0 < \w+\.last_user_idx\b", "false"),
    # Qwen3: an answer without a thought has an empty one only if it is the last message.
    (r"loop\.last or \(not loop\.last and reasoning_content\)", "true"),
    # gpt-oss: only the last message has its thought and ends with <|return|>; a call loses its thought to the
    # answer that follows.
    (r"loop\.last and not add_generation_prompt\b", "true"),
    (r"not future_final_message\.found\b", "true"),
    # DeepSeek R1's distillations and V3.1: the thought that the generation prompt opens is in no message.
    (
        r"\{\{'<｜Assistant｜>' \+ content \+ '<｜end▁of▁sentence｜>'\}\}",
        "{%- if loop.last %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- else %}"
        "{{'<｜Assistant｜><think>\\n' + (message['reasoning_content'] or (message['content']"
        ".split('</think>')[0].split('<think>')[-1] if '</think>' in message['content'] else '')).strip() + "
        "'\\n</think>\\n\\n' + content.lstrip('\\n') + '<｜end▁of▁sentence｜>'}}{%- endif %}",
    ),
)
SINGLE_TURNS = tuple(
    (QUESTION, ANSWER | extra)
    for extra in ({}, {"reasoning_content": "Hm."}, {"content": "<think>\nHm.\n</think>\n\nYes"})
)


def training_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's own chat template, changed by RULES; unchanged where none applies.

    Raises UserError without a template, and if a conversation of one turn is written otherwise than before.
    """
    original = tokenizer.chat_template
    if not isinstance(original, str):
        has = "has none" if original is None else f"has several ({', '.join(original)})"
        raise UserError(
            f"data.chat_template=training changes the tokenizer's template, but it {has}; "
            "name a file with one."
        )
    changed = original
    for pattern, replacement in RULES:
        changed = re.sub(pattern, lambda _, text=replacement: text, changed)
    for messages in SINGLE_TURNS:
        before, after = (_written(tokenizer, list(messages), template) for template in (original, changed))
        if before != after:
            raise UserError(
                "data.chat_template=training would change what the tokenizer's template writes of one turn; "
                "use data.split_turns=true, which leaves the template as it is."
            )
    return changed


def _written(tokenizer: PreTrainedTokenizerBase, messages: list[dict], template: str) -> str:
    """The rendering of a conversation; why it failed if the template refuses it. Raises UserError if slow."""
    try:
        with render_limit():
            return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except UserError:
        raise
    except Exception as error:  # a template is a program of its own
        return str(error)
