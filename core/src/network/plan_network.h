// The steps of planning a general network.
#ifndef PENSTOCK_NETWORK_PLAN_NETWORK_H
#define PENSTOCK_NETWORK_PLAN_NETWORK_H

#include "bundle/network_shapes.h"
#include "program/program.h"

namespace ps {

// Infers all shapes and places all values; `out` is empty.
ps_status make_network_plan(ps_program* program, const NetworkSizes& sizes, NetworkPlan* out);
// Sets the addresses of the calls, in out->shape.arena.
ps_status bind_network_plan(ps_program* program, NetworkPlan* out);
// Builds the steps of the program's current plan.
ps_status make_network_steps(ps_program* program);
// Moves the addresses of the calls to another arena.
void move_network(NetworkPlan* plan, uint8_t* arena);

}  // namespace ps

#endif
