// The parser of the command line.
#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "draft.h"

namespace lite {

const char kHelp[] =
    "usage: penstock-lite [options] BUNDLE PROMPT\n"
    "       penstock-lite [options] BUNDLE --input x.npy [--output y.npy]\n"
    "\n"
    "Continue a prompt with a .psm bundle, streaming to standard output; no Python.  Or run the bundle of a general\n"
    "network on arrays in files.\n"
    "Sampling that is not given comes from the bundle's generation_config.json.\n"
    "\n"
    "  BUNDLE               a .psm file, as penstock export makes it\n"
    "  PROMPT               the text to continue; - reads it from standard input, at most 256 bytes for each token "
    "that the\n"
    "                       context holds\n"
    "  --max-tokens N       tokens to make at most (256), and no more than the context holds behind the prompt\n"
    "  --temperature T      0: greedy\n"
    "  --top-k K            keep the K likeliest tokens; 0: all\n"
    "  --top-p P            keep the smallest set that reaches P; 1: all\n"
    "                       With --top-k or --top-p a bundle that is greedy by itself samples at temperature 1\n"
    "  --seed S             the same seed gives the same text\n"
    "  --ignore-eos         go on past end tokens\n"
    "  --stop TEXT          end where the answer says TEXT, which is left out; may be given again\n"
    "  --prompt-lookup N    guess up to N tokens (15 at most) from what the text said before, and check them in one "
    "step: the same\n"
    "                       tokens, sooner where an answer repeats its prompt; 0: do not (default)\n"
    "  --threads N          0: as many as allowed (default)\n"
    "  --weights HOW        mmap: the file's pages, shared with other processes (default); huge: a private copy in "
    "huge pages\n"
    "  --verify             check the checksum of every segment first, which reads the whole file; a damaged one ends "
    "with the\n"
    "                       status 1 (default: off)\n"
    "  --kv-cache TYPE      type of keys and values: auto (f32 under the scheme f32, else bf16), f32, bf16, int8, "
    "int4\n"
    "  --ops LIB.so         a shared library with ops of your own (docs/guides/custom-ops.md), which is run: once for "
    "each\n"
    "  --ids                PROMPT is token ids (1,2,3 or 1 2 3), and so is what is printed: needs no tokenizer\n"
    "  --input [NAME=]FILE  an input of a general network, as numpy.save writes it: once for each, in their order or "
    "by "
    "name\n"
    "  --output [NAME=]FILE where an output goes, likewise; without it the beginning of each output is printed\n"
    "  --json               print one object instead of text\n"
    "  --bench              go on past end tokens and print speed and memory on standard error\n"
    "  --version            print the version\n"
    "  --help               print this\n";

namespace {

struct Parser {
  char* message;
  uint64_t message_bytes;

  bool fail(const char* option, const char* expected, const char* found) {
    snprintf(message, message_bytes, "%s: expected %s, got %s%s%s", option, expected, found ? "\"" : "",
             found ? found : "nothing", found ? "\"" : "");
    return false;
  }

  bool whole(const char* option, const char* text, int64_t least, int64_t most, const char* expected, int64_t* out) {
    char* end = nullptr;
    errno = 0;
    const long long value = text ? strtoll(text, &end, 10) : 0;
    if (!text || end == text || *end || errno || value < least || value > most ||
        isspace(static_cast<unsigned char>(*text)))
      return fail(option, expected, text);
    *out = value;
    return true;
  }

  bool number(const char* option, const char* text, double least, double most, const char* expected, double* out) {
    char* end = nullptr;
    const double value = text ? strtod(text, &end) : 0;
    if (!text || end == text || *end || !isfinite(value) || value < least || value > most ||
        isspace(static_cast<unsigned char>(*text)))
      return fail(option, expected, text);
    *out = value;
    return true;
  }

  bool seed(const char* text, Options* out) {
    char* end = nullptr;
    errno = 0;
    out->seed = text ? strtoull(text, &end, 10) : 0;
    if (!text || end == text || *end || errno || !isdigit(static_cast<unsigned char>(*text)))
      return fail("--seed", "a whole number from 0 to 2^64-1", text);
    out->has_seed = true;
    return true;
  }

  bool kv_cache(const char* text, Options* out) {
    static const char* const names[] = {"auto", "f32", "bf16", "int8", "int4"};
    for (const char* name : names) {
      if (text && strcmp(text, name) == 0) {
        out->kv_cache = name;
        return true;
      }
    }
    return fail("--kv-cache", "auto, f32, bf16, int8 or int4", text);
  }

  bool weights(const char* text, Options* out) {
    out->huge = text && strcmp(text, "huge") == 0;
    return out->huge || (text && strcmp(text, "mmap") == 0) || fail("--weights", "mmap or huge", text);
  }

  bool stop(const char* text, Options* out) {
    if (!text || !*text) return fail("--stop", "a text", text);
    out->stops.push(text);
    return true;
  }

  bool array(const char* option, const char* text, Array<const char*>* out) {
    if (!text || !*text) return fail(option, "a file of numpy.save, or NAME=FILE", text);
    if (out->size == 64) return fail(option, "at most 64 arrays", text);
    out->push(text);
    return true;
  }

  bool library(const char* path, Options* out) {
    if (!path || !*path) return fail("--ops", "the file of a shared library", path);
    out->ops.push(path);
    return true;
  }

  // Finds an option that takes a value; -1: no option has this name.
  int valued(const char* name, const char* value, Options* out) {
    if (strcmp(name, "--max-tokens") == 0)
      return whole(name, value, 1, kMaxTokens, "a whole number from 1 to 2147483647", &out->max_tokens);
    if (strcmp(name, "--temperature") == 0)
      return number(name, value, 0, 100, "a number from 0 to 100", &out->temperature);
    if (strcmp(name, "--top-k") == 0)
      return whole(name, value, 0, INT32_MAX, "a whole number from 0 to 2147483647", &out->top_k);
    if (strcmp(name, "--top-p") == 0) return number(name, value, 1e-6, 1, "a number above 0 and up to 1", &out->top_p);
    if (strcmp(name, "--seed") == 0) return seed(value, out);
    if (strcmp(name, "--threads") == 0)
      return whole(name, value, 0, 1024, "a whole number from 0 to 1024", &out->threads);
    if (strcmp(name, "--kv-cache") == 0) return kv_cache(value, out);
    if (strcmp(name, "--weights") == 0) return weights(value, out);
    if (strcmp(name, "--stop") == 0) return stop(value, out);
    if (strcmp(name, "--prompt-lookup") == 0)
      return whole(name, value, 0, kMaxDraft, "a whole number from 0 to 15", &out->prompt_lookup);
    if (strcmp(name, "--ops") == 0) return library(value, out);
    if (strcmp(name, "--input") == 0) return array(name, value, &out->inputs);
    if (strcmp(name, "--output") == 0) return array(name, value, &out->outputs);
    return -1;
  }

  // Sets an option without a value; -1: no option has this name. `value`: the text after `=`, or null.
  int flag(const char* name, const char* value, Options* out) {
    const struct {
      const char* name;
      bool* value;
    } flags[] = {{"--ids", &out->ids},       {"--json", &out->json},
                 {"--bench", &out->bench},   {"--ignore-eos", &out->ignore_eos},
                 {"--verify", &out->verify}, {"--help", &out->help},
                 {"-h", &out->help},         {"--version", &out->version}};
    for (const auto& one : flags) {
      if (strcmp(name, one.name) != 0) continue;
      if (value) return fail(name, "no value", value);
      *one.value = true;
      return 1;
    }
    return -1;
  }

  // Parses the option at `words`, with its value as --name=value or in the next word; `moved`: the extra words used.
  bool option(char** words, Options* out, int* moved) {
    char* equals = strchr(words[0], '=');
    if (equals) *equals = 0;
    int known = flag(words[0], equals ? equals + 1 : nullptr, out);
    if (known >= 0) return known;
    known = valued(words[0], equals ? equals + 1 : words[1], out);  // null after the last word
    if (known < 0) return fail("options", "those of --help", words[0]);
    *moved = !equals;
    return known;
  }

  bool positional(const char* text, Options* out) {
    if (!out->bundle) {
      out->bundle = text;
    } else if (!out->prompt) {
      out->prompt = text;
    } else {
      return fail("PROMPT", "one text (put it in quotes)", text);
    }
    return true;
  }
};

}  // namespace

bool parse_options(int argc, char** argv, Options* out, char* message, uint64_t message_bytes) {
  Parser parser{message, message_bytes};
  bool only_positional = false;
  for (int i = 1; i < argc; ++i) {
    char* word = argv[i];
    if (only_positional || word[0] != '-' || !word[1]) {
      if (!parser.positional(word, out)) return false;
    } else if (strcmp(word, "--") == 0) {
      only_positional = true;
    } else {
      int moved = 0;
      if (!parser.option(argv + i, out, &moved)) return false;
      i += moved;
    }
  }
  if (out->help || out->version) return true;
  if (!out->bundle) return parser.fail("BUNDLE", "a .psm file", nullptr);
  if (out->prompt && (out->inputs.size || out->outputs.size))
    return parser.fail("PROMPT", "none with --input and --output", out->prompt);
  if (out->ids && out->stops.size) return parser.fail("--stop", "an answer in text", "--ids");
  return true;
}

}  // namespace lite
