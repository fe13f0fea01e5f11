#include "routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace hr {
namespace {

// Indices of the `count` largest of n numbers, the largest first; of equal ones the lowest index first. None may be NaN.
void find_best(const float* x, int n, int count, int32_t* best) {
  int filled = 0;
  for (int i = 0; i < n; i++) {
    if (filled == count && !(x[i] > x[best[count - 1]])) continue;
    int at = filled < count ? filled++ : count - 1;
    for (; at > 0 && x[i] > x[best[at - 1]]; at--) best[at] = best[at - 1];
    best[at] = i;
  }
}

// What is outside the best groups becomes minus infinity. `best` has room for as many as are looked for.
void keep_best_groups(const Routing& r, float* worth, float* group_worth, int32_t* best) {
  const int members = r.num_experts / r.num_groups;
  for (int g = 0; g < r.num_groups; g++) {
    const float* of_group = worth + g * members;
    find_best(of_group, members, r.num_per_group_score, best);
    group_worth[g] = of_group[best[0]];
    for (int i = 1; i < r.num_per_group_score; i++) group_worth[g] += of_group[best[i]];
  }
  find_best(group_worth, r.num_groups, r.num_groups_used, best);
  for (int i = 0; i < r.num_groups_used; i++) group_worth[best[i]] = NAN;  // as a mark
  for (int g = 0; g < r.num_groups; g++)
    if (!std::isnan(group_worth[g])) std::fill_n(worth + g * members, members, -INFINITY);
}

}  // namespace

void check_routing(const Routing& r) {
  const bool is_possible = r.num_experts > 0 && r.num_per_token > 0 && r.num_per_token <= r.num_experts && r.num_groups > 0 &&
                           r.num_experts % r.num_groups == 0 && r.num_groups_used > 0 && r.num_groups_used <= r.num_groups;
  if (!is_possible) throw std::invalid_argument("the routing's numbers of experts and groups do not fit together");
  const int members = r.num_experts / r.num_groups;
  if (r.num_groups > 1 && (r.num_per_group_score < 1 || r.num_per_group_score > members))
    throw std::invalid_argument("a group's score takes more experts than the group has");
  if (r.num_groups_used * members < r.num_per_token)
    throw std::invalid_argument("the groups used have fewer experts than a token needs");
}

void route(const Kernels& kernels, const Routing& r, const float* scores, const float* bias, float* room, int32_t* experts,
           float* weights) {
  const int n = r.num_experts, count = r.num_per_token;
  float *chances = room, *worth = room + n, *group_worth = room + 2 * n;
  const float highest = kernels.peak(scores, n);
  bool is_sound = !std::isnan(highest);
  if (is_sound) {
    if (r.is_sigmoid) {
      kernels.sigmoid(scores, n, chances);
    } else {
      const float total = kernels.weigh(scores, n, {highest, 1.0f, 0.0f}, chances);
      for (int e = 0; e < n; e++) chances[e] /= total;
    }
    for (int e = 0; e < n; e++) worth[e] = bias ? chances[e] + bias[e] : chances[e];
    is_sound = !std::isnan(kernels.peak(worth, n));
  }
  if (!is_sound) {
    std::iota(experts, experts + count, 0);
    std::fill_n(weights, count, NAN);
    return;
  }
  if (r.num_groups > 1) {
    int32_t few[64];
    std::vector<int32_t> many;
    const int most = std::max(r.num_groups_used, r.num_per_group_score);
    if (most > 64) many.resize(most);
    keep_best_groups(r, worth, group_worth, most > 64 ? many.data() : few);
  }
  find_best(worth, n, count, experts);
  float total = 0;
  for (int i = 0; i < count; i++) {
    weights[i] = chances[experts[i]];
    total += weights[i];
  }
  total = std::max(total, r.norm_floor);
  for (int i = 0; i < count; i++) weights[i] = (r.is_normalised ? weights[i] / total : weights[i]) * r.scale;
}

}  // namespace hr
