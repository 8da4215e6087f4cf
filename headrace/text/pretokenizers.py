"""Pre-tokenizers by the name that GGUF files give them (`tokenizer.ggml.pre`): facts of the published models.

A pre-tokenizer is a list of regular expressions applied one after the other; each cuts every piece so far into its
matches and the gaps between them. A wrong one gives plausible but worse tokens, so an unknown name is an error, never
a guess. Knows no vocabulary.
"""

from dataclasses import dataclass

# English contractions in any case. Spelled out: a case-insensitive group would also match the long s, U+017F.
_CONTRACTION = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_TRAILING_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS_APART = (r"\p{N}", _GPT2)
_LLAMA3 = (
    rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TRAILING_SPACE}"
)
_QWEN2 = rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TRAILING_SPACE}"
_QWEN35 = (
    rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TRAILING_SPACE}"
)
_SEED_CODER = rf"(?:{_CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TRAILING_SPACE}"
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)

# Letters that are not ASCII lower case, then letters that are not ASCII upper case: words split at camelCase.
_CASED = (
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+%s"
    r"|[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*%s"
)
_TEKKEN = _CASED % ("", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TRAILING_SPACE}"
_GPT4O = (
    _CASED % (f"(?:{_CONTRACTION})?", f"(?:{_CONTRACTION})?")
    + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TRAILING_SPACE}"
)

_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TRAILING_SPACE}",
)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5À-ÖØ-öø-ƺƼ-ƿ\u01c4-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    "ὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124"
    "\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\ufb00"
    "-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
# GGUF's reference reader takes white space out of these two classes, the ideographic space U+3000 among it.
_DEEPSEEK_CJK = "[[\u0800-\u9fa5\uac00-\ud7ff]&&[^\\s]]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001-\u3002]+",
    r"\s+\z",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
_WORDS_AND_STOPS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """`patterns` in order. `whole_words`: a word that is a token is taken whole, without merging (`ignore_merges`).

    `add_bos`: the family starts prompts with a begin token when the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


# The first name of a family is the one that a written file gets.
_FAMILIES: tuple[tuple[Pretokenizer, str], ...] = (
    (Pretokenizer(_DEFAULT), "default"),
    (
        Pretokenizer((_GPT2,)),
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais trillion "
        "granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe",
    ),
    (Pretokenizer(_DIGITS_APART), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (
        Pretokenizer((_LLAMA3,), whole_words=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (Pretokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (Pretokenizer((_LLAMA3,), whole_words=True), "glm4 glm5"),
    (
        Pretokenizer((_QWEN2,)),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2",
    ),
    (Pretokenizer((_QWEN35,)), "qwen35"),
    (Pretokenizer(_DEEPSEEK_LLM), "deepseek-llm"),
    (Pretokenizer(_DEEPSEEK_CODER), "deepseek-coder"),
    (Pretokenizer(_DEEPSEEK3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (Pretokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (Pretokenizer((_TEKKEN,), whole_words=True, add_bos=True), "tekken"),
    (Pretokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (Pretokenizer((_WORDS_AND_STOPS,)), "poro-chat bloom gpt3-finnish"),
    (Pretokenizer((_WORDS_AND_STOPS, r"\p{N}")), "viking"),
    (Pretokenizer((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (Pretokenizer((_SEED_CODER,)), "seed-coder"),
)

PRETOKENIZERS: dict[str, Pretokenizer] = {name: family for family, names in _FAMILIES for name in names.split()}
