// Rendezvous on one host: how processes that a launcher started find each other.
#ifndef PENSTOCK_COMM_RENDEZVOUS_H
#define PENSTOCK_COMM_RENDEZVOUS_H

#include "comm/shared.h"

namespace ps {

// The rank in the environment variables of a launcher.
ps_status read_rank_environment(ps_rank_place* out);
// Waits for the other ranks and opens `out` over memory that all share.
ps_status join_ranks(const ps_join_options& options, SharedComm* out);

}  // namespace ps

#endif
