// Which experts a token goes to, and with what weights. RoutingSpec in kernels/ops.py says what each field means.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace hr {

struct Routing {
  int num_experts, num_per_token;
  bool is_sigmoid, is_normalised;  // not is_sigmoid: softmax
  float norm_floor, scale;
  int num_groups, num_groups_used, num_per_group_score;
};

// Throws std::invalid_argument where no choice is possible.
void check_routing(const Routing& routing);

// Numbers that route() and its caller need room for: chances, worths and the worths of groups.
inline int routing_room(const Routing& routing) { return 2 * routing.num_experts + routing.num_groups; }

// One token: the experts in the order of choice, and their weights. `bias` may be nullptr. Where a number is not finite the
// weights are NaN and the experts any: a broken row must not end as plausible numbers.
void route(const Kernels& kernels, const Routing& routing, const float* scores, const float* bias, float* room,
           int32_t* experts, float* weights);

}  // namespace hr
