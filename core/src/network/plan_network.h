// The steps in which a general network's plan is made.
#ifndef PENSTOCK_NETWORK_PLAN_NETWORK_H
#define PENSTOCK_NETWORK_PLAN_NETWORK_H

#include "bundle/network_shapes.h"
#include "program/program.h"

namespace ps {

// Infers all shapes and places all values; `out` is empty.
ps_status make_network_plan(ps_program* program, const NetworkSizes& sizes, NetworkPlan* out);
// Gives the calls addresses in out->shape.arena.
ps_status bind_network_plan(ps_program* program, NetworkPlan* out);
// Makes the steps of the plan that is the program's own.
ps_status make_network_steps(ps_program* program);
// Changes the addresses of the calls to those of another arena.
void move_network(NetworkPlan* plan, uint8_t* arena);

}  // namespace ps

#endif
