"""Short chat templates that behave like published templates."""

from dataclasses import dataclass

from helpers.tokenizers import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA3 = (
    "{{- bos_token }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim"
    " + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)

# Reasoning is kept only after the last question. A last answer without reasoning gets empty tags.
QWEN3 = (
    "{%- set ns = namespace(asked=-1) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set content = m.content %}{%- set thought = '' %}"
    "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.asked and (loop.last or thought) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n'"
    " + content.lstrip('\n') + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

# The system turn is written into the last turn of the user.
MISTRAL = (
    "{%- set ns = namespace(asked=-1) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}"
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- if loop.index0 == ns.asked and messages[0].role == 'system' %}"
    "{{- '[INST] ' + messages[0].content + '\n\n' + m.content + '[/INST]' }}"
    "{%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{%- endif %}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
)

# As in some releases, the system turn is omitted if an answer follows the last turn of the user.
MISTRAL_LAST = MISTRAL.replace("loop.index0 == ns.asked", "loop.last")

# The generation prompt opens a reasoning tag. Answers are written without reasoning.
R1 = (
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{{- '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}"
    "{%- else %}{{- '<|User|>' + m.content }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|Assistant|><think>\n' }}{%- endif %}"
)


# Tools and their calls, as in the templates of Qwen and of Llama 3.
_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + _CALLS.replace(
    "CALL",
    '<tool_call>{"name": {{ c.function.name | tojson }}, '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>',
)
LLAMA_TOOLS = "{% if tools %}Functions: {{ tools | tojson }}{% endif %}" + _CALLS.replace(
    "CALL",
    '{"name": {{ c.function.name | tojson }}, "parameters": {{ c.function.arguments | tojson }}}',
)


@dataclass(frozen=True)
class Family:
    """A chat template, and the special tokens of its tokenizer."""

    template: str
    markers: tuple[str, ...]
    end: str


_IM = ("<|im_start|>", "<|im_end|>")
_HEADER = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
FAMILIES = {
    "chatml": Family(CHATML, _IM, "<|im_end|>"),
    "llama-3": Family(LLAMA3, _HEADER, "<|eot_id|>"),
    "qwen3": Family(QWEN3, (*_IM, "<think>", "</think>"), "<|im_end|>"),
    "gemma": Family(GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "mistral": Family(MISTRAL, ("<s>", "[INST]", "[/INST]"), "</s>"),
    "mistral-last": Family(MISTRAL_LAST, ("<s>", "[INST]", "[/INST]"), "</s>"),
    "r1": Family(R1, ("<bos>", "<|User|>", "<|Assistant|>", "<think>", "</think>"), "</s>"),
}


def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Return a tiny tokenizer with the template and the markers of a family."""
    family = FAMILIES[name]
    tokenizer = tiny_tokenizer(family.template)
    tokenizer.add_tokens(list(family.markers), special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token = family.markers[0], family.end
    return tokenizer
