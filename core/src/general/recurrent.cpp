// Ops of general networks: lstm, gru.
// Hot: runs in every step.
#include "ops/expect.h"

namespace ps {

ps_status infer_lstm(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "lstm: not built yet"); }
Phases lstm_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status lstm_scratch(const Call&, Scratch*) { return PS_OK; }

ps_status infer_gru(const Spec*, AttrValue*, Spec*) { return fail(PS_UNSUPPORTED, "gru: not built yet"); }
Phases gru_phases(const Call&) { return Phases{nullptr, 0}; }
ps_status gru_scratch(const Call&, Scratch*) { return PS_OK; }

}  // namespace ps
