// Draws tokens from rows of logits. runner/sampler.py defines what each setting means, and its numpy code is what the tests
// compare with.
#pragma once

namespace hr {

struct Draw {
  const float* row;
  int best;            // the first of its largest
  double temperature;  // above 0
  int top_k;           // below 1: all
  double top_p, min_p;
  double chance;  // in (0, 1)
};

// One thread's work; nothing but the draw decides.
int draw_token(const Draw& draw, int width);

}  // namespace hr
