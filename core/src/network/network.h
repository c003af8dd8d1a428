// Runs of programs of general networks.
#ifndef PENSTOCK_NETWORK_NETWORK_H
#define PENSTOCK_NETWORK_NETWORK_H

#include "program/program.h"

namespace ps {

// Plans for inputs of these shapes; does not read their data.
ps_status prepare_network(ps_program* program, const ps_array* inputs, int32_t num_inputs);
ps_status run_network(ps_program* program, const ps_array* inputs, int32_t num_inputs);
ps_status network_output(const ps_program& program, int32_t index, ps_array* out);

}  // namespace ps

#endif
