// penstock-lite for a general network: arrays in files in, arrays in files out.
#ifndef PENSTOCK_LITE_NETWORK_H
#define PENSTOCK_LITE_NETWORK_H

#include "options.h"

namespace lite {

// Returns the exit status; `message` gives the reason if it is not 0. kNotNetwork: the bundle is a language model.
constexpr int kNotNetwork = -1;
int run_network(const Options& options, double start, char* message, uint64_t message_bytes);

}  // namespace lite

#endif
