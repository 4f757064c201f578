// SPDX-License-Identifier: Apache-2.0
#include "sluice/parallel/paper_exchanges.h"

#include <cassert>
#include <mutex>

namespace sluice {
namespace {

std::mutex mutex;  // a backward pass may exchange on a thread of its own
PaperExchanges* counting = nullptr;

}  // namespace

PaperExchanges::PaperExchanges() {
  const std::scoped_lock lock(mutex);
  assert(counting == nullptr);
  counting = this;
}

PaperExchanges::~PaperExchanges() {
  const std::scoped_lock lock(mutex);
  counting = nullptr;
}

PaperExchanges::Sums PaperExchanges::waited_for() const {
  const std::scoped_lock lock(mutex);
  return waited_for_;
}

PaperExchanges::Sums PaperExchanges::beside() const {
  const std::scoped_lock lock(mutex);
  return beside_;
}

void PaperExchanges::note(const Group& group, double bytes, bool beside) {
  const std::scoped_lock lock(mutex);
  if (counting == nullptr) return;
  auto& sum = (beside ? counting->beside_ : counting->waited_for_)[group.members()];
  ++sum.calls;
  sum.bytes += bytes;
}

}  // namespace sluice
