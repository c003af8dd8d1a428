// Continue a prompt with a bundle from C++.
//
//   ./generate demo.psm "def add(a, b):" 32 [TEMPERATURE SEED]
#include <cstdlib>
#include <exception>
#include <iostream>

#include "penstock.hpp"

int main(int argc, char** argv) try {
  if (argc < 3) {
    std::cerr << "usage: " << argv[0] << " BUNDLE PROMPT [MAX_TOKENS [TEMPERATURE SEED]]\n";
    return 2;
  }
  const int max_new = argc > 3 ? std::atoi(argv[3]) : 64;
  const float temperature = argc > 4 ? std::strtof(argv[4], nullptr) : 0;
  const uint64_t seed = argc > 5 ? std::strtoull(argv[5], nullptr, 10) : 0;
  const penstock::Context context = penstock::make_context();
  const penstock::Model model = penstock::open_model(argv[1]);
  const penstock::Tokenizer tokenizer(model);
  penstock::Sequence sequence(context, model, tokenizer.encode(argv[2]), max_new);
  std::vector<int32_t> answer;
  for (int64_t begin = 0, last = 0; !last;) {
    answer.push_back(sequence.next(temperature, seed));
    last = static_cast<int>(answer.size()) >= max_new || tokenizer.is_end(answer.back());
    std::cout << tokenizer.decode(answer, &begin, last) << std::flush;
  }
  std::cout << '\n';
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
