# SPDX-License-Identifier: Apache-2.0
"""Writes examples/tiny/tokenizer: a Qwen-style tokenizer with 1,024 ids, for the demo and the tests.

It is trained on the texts of examples/tiny/*.jsonl and on generated sentences, so it works without the former. The same
input gives the same files; run it again after the demo's data change.
"""

import json
import pathlib
import random
from collections.abc import Iterator

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

FOLDER = pathlib.Path(__file__).parent.parent / "examples/tiny"
NUM_IDS = 1024
MODEL_MAX_LENGTH = 4096

# How Qwen3.5 cuts text into words.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

# Behaves as Qwen3's: thoughts stay only in the turns after the last question, a call's results are a user turn.
CHAT_TEMPLATE = r"""
{#- A question is a user turn that is not the result of a tool call. -#}
{%- set question = namespace(last=messages|length - 1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) -%}
    {%- set question.last = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}

{%- if tools -%}
  {{- '<|im_start|>system\n' -}}
  {%- if messages[0].role == 'system' -%}
    {{- messages[0].content + '\n\n' -}}
  {%- endif -%}
  {{- '# Tools\n\nThese functions can be called, each described by one line of JSON:\n<tools>' -}}
  {%- for tool in tools -%}
    {{- '\n' + (tool | tojson) -}}
  {%- endfor -%}
  {{- '\n</tools>\n\nTo call a function, answer with its name and arguments as JSON:\n' -}}
  {{- '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call><|im_end|>\n' -}}
{%- elif messages[0].role == 'system' -%}
  {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' -}}
{%- endif -%}

{%- for message in messages -%}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}

  {%- elif message.role == 'assistant' -%}
    {%- set answer = '' -%}
    {%- set thoughts = '' -%}
    {%- if message.content is string -%}
      {%- set answer = message.content -%}
    {%- endif -%}
    {%- if message.reasoning_content is string -%}
      {%- set thoughts = message.reasoning_content -%}
    {%- elif '</think>' in answer -%}
      {%- set thoughts = answer.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
      {%- set answer = answer.split('</think>')[-1].lstrip('\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\n' -}}
    {%- if loop.index0 > question.last and (loop.last or thoughts) -%}
      {{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + answer.lstrip('\n') -}}
    {%- else -%}
      {{- answer -}}
    {%- endif -%}
    {%- if message.tool_calls -%}
      {%- for call in message.tool_calls -%}
        {%- if answer or not loop.first -%}
          {{- '\n' -}}
        {%- endif -%}
        {%- if call.function -%}
          {%- set call = call.function -%}
        {%- endif -%}
        {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' -}}
        {%- if call.arguments is string -%}
          {{- call.arguments -}}
        {%- else -%}
          {{- call.arguments | tojson -}}
        {%- endif -%}
        {{- '}\n</tool_call>' -}}
      {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\n' -}}

  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
      {{- '<|im_start|>user' -}}
    {%- endif -%}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
      {{- '<|im_end|>\n' -}}
    {%- endif -%}
  {%- endif -%}
{%- endfor -%}

{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}
    {{- '<think>\n\n</think>\n\n' -}}
  {%- endif -%}
{%- endif -%}
""".strip()

SUBJECTS = (
    "the teacher|my brother|an old friend|the small dog|every student|our neighbour|the captain|a young woman|the gardener"
    "|the machine|this model|the river|her sister|the engineer|a quiet child|the baker|someone|the museum|the program"
).split("|")
VERBS = (
    "found|opened|carried|remembered|built|followed|painted|measured|counted|brought|watched|explained|repaired|answered"
    "|wrote about|looked for|talked about|learned from|walked around|thought about"
).split("|")
OBJECTS = (
    "the letter|a red apple|seven books|the open window|a long story|the first question|some warm bread|the blue house"
    "|a simple number|the mountain|two green bottles|the answer|an empty box|the next train|a good idea|the whole table"
    "|the other side|three small stones|a piece of paper|the light"
).split("|")
ENDINGS = (
    "in the morning|before dinner|because it was late|without a word|at the end of the day|when the rain stopped"
    "|near the water|after school|with great care|again and again|for the last time|while the others slept"
    "|and then went home|so that nobody would worry|if there was time"
).split("|")
COMMON_WORDS = (
    "about above across add after again air all almost also always and animal another answer any are around ask away back "
    "be because become before begin below between big bird body book both boy build but by call can car carry change "
    "children city clear close cold color come common could country cover cross cut day deep did different do does door "
    "down draw dry during each early earth east easy eat eight end enough equal even every example eye face fact fall "
    "family far farm fast father feel few field figure final find fire first fish five fly follow food foot for form four "
    "free from full game gave get girl give go gold good govern great green ground group grow had half hand happen hard "
    "has have he head hear heat help here high hold home horse hot hour how hundred idea if in inch interest into is "
    "island it just keep kind king know land language large last late laugh lead leave left less letter life light like "
    "line list listen little live long look lot love low machine made main make many map mark may mean measure men might "
    "mile mind minute money month moon more most mother move much music must name near need never new next night nine no "
    "north note nothing notice now number object ocean of off often on once one only open or order other our out over own "
    "page paper part pass pattern people person picture place plain plan plant play point port power present problem "
    "produce product pull put question quick rain reach read ready real reason record red remain rest right river road "
    "rock room round rule run said same say school science sea second see seem sentence serve set seven several shape "
    "she ship short should show side simple since sing sit six size sleep slow small snow so some song soon sound south "
    "space special stand star start state stay step still stop story street strong study such sum sun sure surface table "
    "take talk tell ten test than that the their them then there these they thing think this those thought thousand three "
    "through time to together too top total toward town travel tree true try turn two under unit until up us use usual "
    "value very voice wait walk want war warm was watch water way we week weight well went were west what wheel when where "
    "which while white who whole why will wind with wonder wood word work world would write year yes yet you young your"
).split()
OPERATIONS = [("plus", "+", int.__add__), ("minus", "-", int.__sub__), ("times", "*", int.__mul__)]


def sentences(count: int) -> Iterator[str]:
    chance = random.Random(1)
    for _ in range(count):
        subject, verb, thing, ending = (chance.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, ENDINGS))
        yield f"{subject.capitalize()} {verb} {thing} {ending}."
        yield " ".join(chance.choices(COMMON_WORDS, k=8)).capitalize() + ".\n"
        a, b = chance.randrange(100), chance.randrange(100)
        word, sign, operation = chance.choice(OPERATIONS)
        result = operation(a, b)
        yield f"What is {a} {word} {b}?\n{a} {word} {b} is {result}.\nCompute {a} {sign} {b} = {result}\n\n"


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def texts() -> Iterator[str]:
    for path in sorted(FOLDER.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                yield from strings(json.loads(line))
    yield from sentences(4000)


def train() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(**byte_level)]
    )
    tokenizer.post_processor = processors.ByteLevel(**byte_level)
    tokenizer.decoder = decoders.ByteLevel(**byte_level)
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_IDS - len(CONTROL_TOKENS) - len(TEXT_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TEXT_TOKENS])
    assert tokenizer.get_vocab_size() == NUM_IDS, "too little text to learn so many merges"
    return tokenizer


def config(tokenizer: Tokenizer) -> dict:
    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    added = tokenizer.get_added_tokens_decoder().items()
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(id): {flag: getattr(token, flag) for flag in flags} for id, token in sorted(added)},
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": MODEL_MAX_LENGTH,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def main() -> None:
    target = FOLDER / "tokenizer"
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    tokenizer.save(str(target / "tokenizer.json"))
    text = json.dumps(config(tokenizer), indent=2, ensure_ascii=False)
    (target / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
