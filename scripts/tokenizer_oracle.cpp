// Prints the token ids that llama.cpp gives: one line a case. Built and run by make_tokenizer_goldens.py.
//
//     tokenizer_oracle MODEL CASES PARSE_SPECIAL ADD_SPECIAL [PRE]
//
// CASES holds, per case, a little-endian u32 length and that many bytes of UTF-8. PRE replaces the file's
// tokenizer.ggml.pre, so that every pre-tokenizer can be asked about with one vocabulary.
#include "llama.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

int main(int argc, char ** argv) {
    if (argc < 5) {
        std::fprintf(stderr, "usage: %s MODEL CASES PARSE_SPECIAL ADD_SPECIAL [PRE]\n", argv[0]);
        return 2;
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
    }, nullptr);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    llama_model_kv_override overrides[2] = {};
    if (argc > 5) {
        overrides[0].tag = LLAMA_KV_OVERRIDE_TYPE_STR;
        std::strncpy(overrides[0].key, "tokenizer.ggml.pre", sizeof overrides[0].key - 1);
        std::strncpy(overrides[0].val_str, argv[5], sizeof overrides[0].val_str - 1);
        params.kv_overrides = overrides;
    }
    llama_model * model = llama_model_load_from_file(argv[1], params);
    if (!model) return 1;
    const llama_vocab * vocab = llama_model_get_vocab(model);
    const bool parse_special = std::atoi(argv[3]) != 0, add_special = std::atoi(argv[4]) != 0;
    std::ifstream file(argv[2], std::ios::binary);
    const std::string cases((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    for (size_t at = 0; at + 4 <= cases.size();) {
        uint32_t size = 0;
        std::memcpy(&size, &cases[at], 4);
        const char * text = &cases[at] + 4;
        at += 4 + size;
        std::vector<llama_token> ids(2 * size + 16);
        const int count =
            llama_tokenize(vocab, text, size, ids.data(), ids.size(), add_special, parse_special);
        for (int i = 0; i < count; ++i) std::printf(i ? " %d" : "%d", ids[i]);
        std::printf("\n");
    }
    return 0;
}
