// penstock-lite for a general network: arrays in files in, arrays in files out.
#ifndef PENSTOCK_LITE_NETWORK_H
#define PENSTOCK_LITE_NETWORK_H

#include "options.h"

namespace lite {

// The exit status.  On an error other than 0, `message` says why.  kNotNetwork: the bundle is a language model's.
constexpr int kNotNetwork = -1;
int run_network(const Options& options, double start, char* message, uint64_t message_bytes);

}  // namespace lite

#endif
