// penstock-lite BUNDLE "prompt" runs a bundle without Python, using only the public C API.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "generate.h"
#include "network.h"
#ifdef PENSTOCK_OPS_FROM
#include "ops_from.h"  // of a build for specific bundles
#else
#define PS_BUILD_NETWORKS 1
#endif

namespace lite {
namespace {

struct Output {
  bool terminal, keep;  // terminal: replace control characters; keep: collect the text instead of writing it
  Array<char> text;
  int error = 0;
};

bool write_all(Output* out, const char* text, int64_t bytes) {
  for (int64_t done = 0; done < bytes;) {
    const ssize_t n = write(STDOUT_FILENO, text + done, static_cast<size_t>(bytes - done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      out->error = errno;
      return false;
    }
    done += n;
  }
  return true;
}

// A control character of a terminal: C0 and DEL, C1 in UTF-8.  Returns its length in bytes; 0: a printable character.
int control_bytes(const char* text, int64_t bytes) {
  const unsigned char c = static_cast<unsigned char>(text[0]),
                      next = bytes > 1 ? static_cast<unsigned char>(text[1]) : 0;
  if (c < ' ' || c == 0x7f) return 1;
  return c == 0xc2 && next >= 0x80 && next < 0xa0 ? 2 : 0;
}

void append_shown(Array<char>* out, const char* text, int64_t bytes, const char* kept, const char* instead) {
  for (int64_t i = 0; i < bytes;) {
    const int control = control_bytes(text + i, bytes - i);
    if (control && !(text[i] && strchr(kept, text[i]))) {
      out->append(instead, static_cast<int64_t>(strlen(instead)));
      i += control;
    } else {
      out->push(text[i++]);
    }
  }
}

// On a terminal control characters are replaced, so that a model's output cannot control it.
bool emit(void* to, const char* text, int64_t bytes) {
  Output* out = static_cast<Output*>(to);
  if (out->keep) {
    out->text.append(text, bytes);
    return true;
  }
  if (!out->terminal) return write_all(out, text, bytes);
  Array<char> shown;
  append_shown(&shown, text, bytes, "\n\t", "\xef\xbf\xbd");
  return write_all(out, shown.data, shown.size);
}

void add(Array<char>* out, const char* text) { out->append(text, static_cast<int64_t>(strlen(text))); }

void add_ids(Array<char>* out, const Generator& generator, const char* between) {
  char number[16];
  for (int64_t i = generator.num_prompt(); i < generator.tokens().size; ++i) {
    if (i > generator.num_prompt()) add(out, between);
    snprintf(number, sizeof(number), "%d", generator.tokens().data[i]);
    add(out, number);
  }
}

void add_string(Array<char>* out, const char* text, int64_t bytes) {
  out->push('"');
  for (int64_t i = 0; i < bytes; ++i) {
    const int control = control_bytes(text + i, bytes - i);
    char escaped[8];
    if (control) {
      i += control - 1;  // the byte after 0xc2 is the code point
      snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned char>(text[i]));
      add(out, escaped);
    } else {
      if (text[i] == '"' || text[i] == '\\') out->push('\\');
      out->push(text[i]);
    }
  }
  out->push('"');
}

int64_t status_bytes(const char* file, const char* key) {
  FILE* f = fopen(file, "r");
  char line[256];
  long long kib = 0;
  while (f && fgets(line, sizeof(line), f)) {
    if (strncmp(line, key, strlen(key)) == 0) sscanf(line + strlen(key), "%lld", &kib);
  }
  if (f) fclose(f);
  return kib * 1024;
}

// Rates are 0 if there is nothing to divide by.
struct Figures {
  double prefill, warm_prefill, decode;
  int64_t peak_rss, pss, private_bytes;
};

Figures figures_of(const Generator& g, bool bench) {
  const Timings& t = g.timings();
  const double prompt = static_cast<double>(g.num_prompt());
  Figures f{};
  if (t.prefill_s > 0) f.prefill = prompt / t.prefill_s;
  if (t.warm_prefill_s > 0) f.warm_prefill = prompt / t.warm_prefill_s;
  if (t.decode_s > 0) f.decode = static_cast<double>(g.num_new() - 1) / t.decode_s;
  f.peak_rss = status_bytes("/proc/self/status", "VmHWM:");
  rusage usage{};  // without /proc; includes what the process used before exec
  if (!f.peak_rss && getrusage(RUSAGE_SELF, &usage) == 0) f.peak_rss = int64_t{usage.ru_maxrss} * 1024;
  if (!bench) return f;
  f.pss = status_bytes("/proc/self/smaps_rollup", "Pss:");
  // Not Private_Dirty, which also counts pages of a program or bundle that was written recently and is not on disk yet.
  f.private_bytes = status_bytes("/proc/self/smaps_rollup", "Anonymous:");
  return f;
}

const char* finish_name(Finish finish) { return finish == FINISH_STOP ? "stop" : "length"; }

bool write_json(Output* out, const Options& options, const Generator& g, Finish finish) {
  const Figures f = figures_of(g, options.bench);
  const Timings& t = g.timings();
  Array<char> json;
  char line[640];
  add(&json, "{\"text\": ");
  if (options.ids) {
    add(&json, "null");
  } else {
    add_string(&json, out->text.data, out->text.size);
  }
  add(&json, ", \"token_ids\": [");
  add_ids(&json, g, ", ");
  snprintf(line, sizeof(line),
           "], \"finish_reason\": \"%s\", \"num_prompt_tokens\": %lld, \"num_guessed_tokens\": %lld, "
           "\"num_accepted_tokens\": %lld, "
           "\"seed\": %llu, \"scheme\": ",
           finish_name(finish), static_cast<long long>(g.num_prompt()), static_cast<long long>(g.num_guessed()),
           static_cast<long long>(g.num_accepted()), static_cast<unsigned long long>(g.seed()));
  add(&json, line);
  add_string(&json, g.info().scheme, static_cast<int64_t>(strlen(g.info().scheme)));
  snprintf(
      line, sizeof(line),
      ", \"num_threads\": %d, \"timings\": {\"load_s\": %.6f, \"first_token_s\": %.6f, \"prefill_tokens_per_s\": %.3f, "
      "\"warm_prefill_tokens_per_s\": %.3f, \"decode_tokens_per_s\": %.3f}, "
      "\"memory\": {\"weight_bytes\": %lld, \"tokenizer_bytes\": %lld, \"plan_bytes\": %lld, \"peak_rss_bytes\": %lld, "
      "\"pss_bytes\": %lld, "
      "\"private_dirty_bytes\": %lld}}\n",
      g.num_threads(), t.load_s, t.first_token_s, f.prefill, f.warm_prefill, f.decode,
      static_cast<long long>(g.weight_bytes()), static_cast<long long>(g.tokenizer_bytes()),
      static_cast<long long>(g.plan_bytes()), static_cast<long long>(f.peak_rss), static_cast<long long>(f.pss),
      static_cast<long long>(f.private_bytes));
  add(&json, line);
  return write_all(out, json.data, json.size);
}

void print_figures(const Options& options, const Generator& g, Finish finish) {
  const Figures f = figures_of(g, options.bench);
  const Timings& t = g.timings();
  fprintf(stderr, "load %.1f ms, first token %.1f ms, ", t.load_s * 1e3, t.first_token_s * 1e3);
  if (f.decode > 0) fprintf(stderr, "%.0f tokens/s, ", f.decode);
  fprintf(stderr, "memory %.1f MB (%s, %d thread%s; %lld + %lld tokens, %s)\n", static_cast<double>(f.peak_rss) / 1e6,
          g.info().scheme, g.num_threads(), g.num_threads() == 1 ? "" : "s", static_cast<long long>(g.num_prompt()),
          static_cast<long long>(g.num_new()), finish_name(finish));
  if (options.prompt_lookup) {
    fprintf(stderr, "prompt lookup: %lld of %lld guessed tokens were right\n", static_cast<long long>(g.num_accepted()),
            static_cast<long long>(g.num_guessed()));
  }
  if (!options.bench) return;
  fprintf(stderr, "prefill %.0f tokens/s (%.0f when the weights were first touched), decode %.0f tokens/s\n",
          f.warm_prefill, f.prefill, f.decode);
  fprintf(stderr, "weights %.2f MB, tokenizer %.2f MB, plan %.2f MB with them, peak RSS %.2f MB, ",
          static_cast<double>(g.weight_bytes()) / 1e6, static_cast<double>(g.tokenizer_bytes()) / 1e6,
          static_cast<double>(g.plan_bytes()) / 1e6, static_cast<double>(f.peak_rss) / 1e6);
  if (!f.pss) {
    fprintf(stderr, "PSS unknown because /proc is not mounted\n");
    return;
  }
  fprintf(stderr, "PSS %.2f MB, private and written %.2f MB\n", static_cast<double>(f.pss) / 1e6,
          static_cast<double>(f.private_bytes) / 1e6);
}

// Reads up to `most` bytes, and one more if there are more.
bool read_stdin(int64_t most, Array<char>* out) {
  char buffer[65536];
  while (out->size <= most) {
    const int64_t room = most + 1 - out->size;
    const ssize_t n =
        read(STDIN_FILENO, buffer, room < int64_t{sizeof(buffer)} ? static_cast<size_t>(room) : sizeof(buffer));
    if (n < 0 && errno == EINTR && !interrupted) continue;
    if (n <= 0) return n == 0;
    out->append(buffer, n);
  }
  return true;
}

// After Ctrl-C a step gets one second to finish.
void on_interrupt(int) {
  interrupted = 1;
  alarm(1);
}
void on_alarm(int) { _exit(130); }

void watch_signals() {
  struct sigaction old, action{};
  signal(SIGPIPE, SIG_IGN);  // writing to a closed pipe returns an error
  if (sigaction(SIGINT, nullptr, &old) == 0 && old.sa_handler == SIG_IGN)
    return;  // started in the background by a shell
  action.sa_handler = on_interrupt;
  sigaction(SIGINT, &action, nullptr);
  action.sa_handler = on_alarm;
  sigaction(SIGALRM, &action, nullptr);
}

// A shell may start the program with a closed standard stream: keep later files from taking its descriptor.
void open_missing_streams() {
  for (int fd = 0; fd < 3; ++fd) {
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd) _exit(1);
  }
}

int report(const char* message) {
  Array<char> shown;
  append_shown(&shown, message, static_cast<int64_t>(strlen(message)), "", "?");
  fprintf(stderr, "penstock-lite: %.*s\n", static_cast<int>(shown.size), shown.data ? shown.data : "");
  return 1;
}

// Exit status 2 if the message blames the prompt or an option.
int report_argument(const char* message) {
  report(message);
  const char* const names[] = {"PROMPT:", "--ids:", "--max-tokens:", "--ops:"};
  for (const char* name : names) {
    if (strncmp(message, name, strlen(name)) == 0) return 2;
  }
  return 1;
}

int report_output(int error) {
  char text[256];
  snprintf(text, sizeof(text), "standard output: %s", strerror(error));
  return report(text);
}

int interrupted_exit() {
  fputc('\n', stderr);
  return 130;
}

int give_out(const Options& options, Generator* g, Output* out) {
  const Finish finish = g->run(emit, out);
  if (out->error == EPIPE) return 1;  // the reader closed the pipe
  if (out->error) return report_output(out->error);
  if (finish == FINISH_ERROR) return report(g->error());
  if (finish == FINISH_INTERRUPT) return interrupted_exit();
  bool written;
  if (options.json) {
    written = write_json(out, options, *g, finish);
  } else {
    Array<char> rest;
    if (options.ids) add_ids(&rest, *g, " ");
    rest.push('\n');
    written = write_all(out, rest.data, rest.size);
  }
  if (!written) return out->error == EPIPE ? 1 : report_output(out->error);
  if (!options.json || options.bench) print_figures(options, *g, finish);
  return 0;
}

// A general network: arrays in, arrays out.  A language model needs a prompt.
int run_arrays(const Options& options, double start) {
  char message[2300] = "";
  const int status = PS_BUILD_NETWORKS ? run_network(options, start, message, sizeof(message)) : kNotNetwork;
  if (status == 0) return 0;
  if (status != kNotNetwork) {
    report(message);
    return status;
  }
  report(options.inputs.size || options.outputs.size
             ? "--input: expected a general network, got a language model, which takes a PROMPT"
             : "PROMPT: expected a text, or - for standard input, got nothing");
  return 2;
}

int run(const Options& options, double start) {
  if (!options.prompt) return run_arrays(options, start);
  Generator generator(options);
  if (!generator.open(start)) return report_argument(generator.error());
  const char* prompt = options.prompt;
  int64_t bytes = static_cast<int64_t>(strlen(prompt));
  Array<char> input;
  if (strcmp(prompt, "-") == 0) {
    const int64_t most = generator.max_prompt_bytes();
    if (!read_stdin(most, &input))
      return interrupted ? interrupted_exit() : report("PROMPT: standard input cannot be read");
    if (input.size > most) {
      char message[160];
      snprintf(message, sizeof(message),
               "PROMPT: expected at most %lld bytes on standard input, 256 for each token of the context; got more",
               static_cast<long long>(most));
      return report_argument(message);
    }
    prompt = input.data ? input.data : "";
    bytes = input.size;
  }
  if (!generator.encode(prompt, bytes) || !generator.prepare()) return report_argument(generator.error());
  Output out{isatty(STDOUT_FILENO) != 0, options.json, {}, 0};
  // On a terminal a completion continues its prompt; a pipe gets only the response.
  if (out.terminal && !options.json && !options.ids) emit(&out, prompt, bytes);
  return give_out(options, &generator, &out);
}

}  // namespace
}  // namespace lite

// --help and --version only print: the program fails if the output cannot be written.
static int say(const char* text) {
  lite::Output out{false, false, {}, 0};
  signal(SIGPIPE, SIG_IGN);
  if (lite::write_all(&out, text, static_cast<int64_t>(strlen(text)))) return 0;
  return out.error == EPIPE ? 1 : lite::report_output(out.error);
}

int main(int argc, char** argv) {
  const double start = lite::now();
  lite::Options options;
  char message[512];
  lite::open_missing_streams();
  if (!lite::parse_options(argc, argv, &options, message, sizeof(message))) {
    lite::report(message);
    return 2;
  }
  if (options.help) return say(lite::kHelp);
  if (options.version) {
    snprintf(message, sizeof(message), "penstock-lite %s (C API %d)\n", ps_version(), ps_abi_version());
    return say(message);
  }
  lite::watch_signals();
  return lite::run(options, start);
}
