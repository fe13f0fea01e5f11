#include "draw.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "kernels.h"

namespace hr {
namespace {

constexpr int kPiece = 256;  // logits whose weights are one step of the running sum
constexpr double kHighestTemperature = 1e30;

struct Candidate {
  float logit, weight;
  int32_t id;
};

bool comes_first(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// Room that a thread keeps: fresh memory would cost a page fault per 4 KB.
struct Scratch {
  std::vector<float> weights, sums;
  std::vector<int32_t> found;
  std::vector<Candidate> candidates, bucket;
};
thread_local Scratch scratch;

Weighing weighing(const Draw& draw) {
  return {draw.row[draw.best], (float)std::min(draw.temperature, kHighestTemperature), (float)draw.min_p};
}

// The largest number below `total` at most: then some running sum exceeds it.
double below(double target, double total) { return std::min(target, std::nextafter(total, 0.0)); }

// Candidates in the order of their logits, as far as that is needed: they are put into buckets of falling logits, and only
// the bucket that matters is sorted.
class Order {
 public:
  explicit Order(const std::vector<Candidate>& candidates) : candidates_(candidates) {
    float lowest = candidates[0].logit;
    for (const Candidate& c : candidates) {
      highest_ = std::max(highest_, c.logit);
      lowest = std::min(lowest, c.logit);
    }
    const float range = highest_ - lowest;
    scale_ = range > 1e-30f ? (kBuckets - 1) / range : 0.0f;
    for (const Candidate& c : candidates) sums_[bucket_of(c)] += c.weight;
    for (double sum : sums_) total_ += sum;
  }
  double total() const { return total_; }

  // The first candidate with which the running sum exceeds `target`, or the last one; and that sum.
  std::pair<int, double> reach(double target) const {
    int bucket = 0;  // the first one holds the best candidate
    double before = 0, through = sums_[0];
    for (int b = 1; b < kBuckets && through <= target; b++)
      if (sums_[b] > 0) {
        before = through;
        through += sums_[b];
        bucket = b;
      }
    std::vector<Candidate>& inside = scratch.bucket;
    inside.clear();
    for (const Candidate& c : candidates_)
      if (bucket_of(c) == bucket) inside.push_back(c);
    std::sort(inside.begin(), inside.end(), comes_first);
    double running = before;
    for (const Candidate& c : inside) {
      running += c.weight;
      if (running > target) return {c.id, running};
    }
    return {inside.back().id, running};
  }

 private:
  static constexpr int kBuckets = 1024;
  int bucket_of(const Candidate& c) const { return (int)((highest_ - c.logit) * scale_); }

  const std::vector<Candidate>& candidates_;
  float highest_ = -std::numeric_limits<float>::infinity(), scale_ = 0;
  double sums_[kBuckets] = {}, total_ = 0;
};

// `total`: what top_p is a part of.
int draw_ordered(const Order& order, double total, const Draw& draw) {
  double kept = order.total();
  if (draw.top_p < 1) kept = order.reach(std::nextafter(draw.top_p * total, -1.0)).second;
  return order.reach(below(draw.chance * kept, kept)).first;
}

// At most the k-th largest logit, and near it: the k-th largest peak of many disjoint parts.
float top_k_bound(const Draw& draw, int width) {
  int part = 4096;  // every 16th logit of so many
  while (part > 16 && width / part * 4 < draw.top_k) part /= 2;
  std::vector<float>& peaks = scratch.sums;
  peaks.resize((size_t)(width + part - 1) / part * 16);
  for (int at = 0; at < width; at += part)
    best_kernels()->lane_peaks(draw.row + at, std::min(part, width - at), peaks.data() + at / part * 16);
  if ((size_t)draw.top_k > peaks.size()) return -std::numeric_limits<float>::infinity();
  std::nth_element(peaks.begin(), peaks.begin() + draw.top_k - 1, peaks.end(), std::greater<float>());
  return peaks[draw.top_k - 1];
}

int draw_top_k(const Draw& draw, int width) {
  const Kernels& kernels = *best_kernels();
  const float bound = top_k_bound(draw, width);
  scratch.found.resize(width);
  const int count = kernels.find_from(draw.row, width, bound, scratch.found.data());
  std::vector<Candidate>& candidates = scratch.candidates;
  candidates.clear();
  for (int i = 0; i < count; i++) candidates.push_back({draw.row[scratch.found[i]], 0, scratch.found[i]});
  std::nth_element(candidates.begin(), candidates.begin() + draw.top_k - 1, candidates.end(), comes_first);
  candidates.resize(draw.top_k);

  std::vector<float>& weights = scratch.weights;
  weights.resize(draw.top_k);
  for (int i = 0; i < draw.top_k; i++) weights[i] = candidates[i].logit;
  kernels.weigh(weights.data(), draw.top_k, weighing(draw), weights.data());
  for (int i = 0; i < draw.top_k; i++) candidates[i].weight = weights[i];
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), [](const Candidate& c) { return c.weight == 0; }),
                   candidates.end());
  const Order order(candidates);
  return draw_ordered(order, order.total(), draw);
}

// Tokens that together weigh less than 1 - top_p cannot be among those that are kept.
int draw_top_p(const Draw& draw, int width) {
  const Kernels& kernels = *best_kernels();
  const Weighing by = weighing(draw);
  std::vector<float>& weights = scratch.weights;
  weights.resize(width);
  double total = 0;
  for (int at = 0; at < width; at += kPiece)
    total += kernels.weigh(draw.row + at, std::min(kPiece, width - at), by, weights.data() + at);
  const float lightest = (float)(0.5 * (1 - draw.top_p) * total / width);  // half: room for the sum's rounding
  scratch.found.resize(width);
  const int count = kernels.find_from(weights.data(), width, std::nextafter(lightest, 1.0f), scratch.found.data());
  scratch.candidates.clear();
  for (int i = 0; i < count; i++) {
    const int id = scratch.found[i];
    scratch.candidates.push_back({draw.row[id], weights[id], id});
  }
  return draw_ordered(Order(scratch.candidates), total, draw);
}

// First the piece, then the token in it.
int draw_any(const Draw& draw, int width) {
  const Kernels& kernels = *best_kernels();
  const Weighing by = weighing(draw);
  float weights[kPiece];
  scratch.sums.clear();
  double total = 0;
  for (int at = 0; at < width; at += kPiece) {
    scratch.sums.push_back(kernels.weigh(draw.row + at, std::min(kPiece, width - at), by, weights));
    total += scratch.sums.back();
  }
  const double target = below(draw.chance * total, total);
  size_t piece = 0;
  double before = 0;
  while (before + scratch.sums[piece] <= target) before += scratch.sums[piece++];

  const int first = (int)piece * kPiece, count = std::min(kPiece, width - first);
  kernels.weigh(draw.row + first, count, by, weights);
  double sum = 0, running = 0;
  for (int i = 0; i < count; i++) sum += weights[i];
  const double rest = below(target - before, sum);  // the piece's own sum was rounded otherwise
  int at = 0;
  while ((running += weights[at]) <= rest) at++;
  return first + at;
}

}  // namespace

int draw_token(const Draw& draw, int width) {
  if (draw.top_k > 0 && draw.top_k < width) return draw_top_k(draw, width);
  return draw.top_p < 1 ? draw_top_p(draw, width) : draw_any(draw, width);
}

}  // namespace hr
