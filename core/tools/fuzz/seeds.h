// Reads the seed files of the fuzzers, which their command lines name.
#ifndef PENSTOCK_TOOLS_SEEDS_H
#define PENSTOCK_TOOLS_SEEDS_H

#include <stdint.h>
#include <stdio.h>

#include <vector>

// The bytes of each file; false, with a message on standard error, if one cannot be read or has at most `least` bytes.
inline bool read_seeds(char** paths, int count, size_t least, const char* what,
                       std::vector<std::vector<uint8_t>>* out) {
  for (int i = 0; i < count; ++i) {
    std::vector<uint8_t> bytes;
    uint8_t buffer[65536];
    if (FILE* file = fopen(paths[i], "rb")) {
      for (size_t n; (n = fread(buffer, 1, sizeof(buffer), file)) > 0;) bytes.insert(bytes.end(), buffer, buffer + n);
      fclose(file);
    }
    if (bytes.size() <= least) {
      fprintf(stderr, "%s: not a %s to start from\n", paths[i], what);
      return false;
    }
    out->push_back(static_cast<std::vector<uint8_t>&&>(bytes));
  }
  return true;
}

#endif
