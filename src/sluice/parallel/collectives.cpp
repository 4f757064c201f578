// SPDX-License-Identifier: Apache-2.0
#include "sluice/parallel/collectives.h"

#include <torch/custom_class.h>

#include <algorithm>
#include <cassert>
#include <functional>
#include <numeric>

#include "sluice/parallel/communicator.h"
#include "sluice/parallel/paper_exchanges.h"

namespace sluice {
namespace {

using Counts = std::vector<std::int64_t>;

std::int64_t sum(Rows rows) { return std::accumulate(rows.begin(), rows.end(), std::int64_t{0}); }

Tensor with_rows(const Tensor& like, std::int64_t rows) {
  auto sizes = like.sizes().vec();
  sizes[0] = rows;
  return at::empty(sizes, like.options());
}

bool are_equal(Rows rows) {
  return std::ranges::all_of(rows, [&](auto r) { return r == rows[0]; });
}

// What leaves each member when `all` goes once around the group.
void note_on_paper(const Group& group, const Tensor& all, bool beside) {
  const auto size = static_cast<double>(group.size());
  PaperExchanges::note(group, static_cast<double>(all.nbytes()) * (size - 1) / size, beside);
}

// An exchange in which `all` goes `rounds` times around. On paper there is nothing to send.
void run(const Group& group, const char* name, const Tensor& all, const Communicator::Exchange& exchange,
         int rounds = 1) {
  if (all.is_meta()) {
    for (int i = 0; i < rounds; ++i) note_on_paper(group, all, /*beside=*/false);
    return;
  }
  const auto& communicator = group.communicator();
  communicator.wait(name, *communicator.start(name, all.device(), exchange));
}

using Result = std::function<Tensor()>;

// Backends exchange as many rows with each member: shorter parts are padded to the longest.
Result start_gather(const Tensor& x, Rows rows, const Group& group, bool beside) {
  assert(x.size(0) == rows[group.rank()]);
  const auto longest = std::ranges::max(rows);
  auto all = with_rows(x, longest * group.size());
  if (all.numel() == 0) return [none = with_rows(x, sum(rows))] { return none; };
  auto own = x.contiguous();
  if (x.size(0) < longest) {
    own = with_rows(x, longest);
    own.narrow(0, 0, x.size(0)).copy_(x);
    own.narrow(0, x.size(0), longest - x.size(0)).zero_();
  }
  auto joined = [all, longest, counts = Counts(rows.begin(), rows.end())] {
    if (are_equal(counts)) return all;
    std::vector<Tensor> parts;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      parts.push_back(all.narrow(0, static_cast<std::int64_t>(i) * longest, counts[i]));
    }
    return at::cat(parts);
  };
  if (all.is_meta()) {
    note_on_paper(group, all, beside);
    return joined;
  }
  constexpr auto kName = "all-gather";
  auto work = group.communicator().start(kName, x.device(),
                                         [&](c10d::Backend& backend) { return backend._allgather_base(all, own); });
  return [group, own, joined, work = std::move(work)] {
    group.communicator().wait(kName, *work);
    return joined();
  };
}

Tensor gather(const Tensor& x, Rows rows, const Group& group) {
  return start_gather(x, rows, group, /*beside=*/false)();
}

Result start_reduce_scatter(const Tensor& x, Rows rows, const Group& group, bool beside) {
  assert(x.size(0) == sum(rows));
  const auto longest = std::ranges::max(rows);
  auto own = with_rows(x, longest);
  auto result = own.narrow(0, 0, rows[group.rank()]);
  if (own.numel() == 0) return [result] { return result; };
  auto all = x.contiguous();
  if (!are_equal(rows)) {
    all = with_rows(x, longest * group.size()).zero_();
    std::int64_t begin = 0;
    for (std::int64_t i = 0; i < group.size(); begin += rows[i++]) {
      all.narrow(0, i * longest, rows[i]).copy_(x.narrow(0, begin, rows[i]));
    }
  }
  if (all.is_meta()) {
    note_on_paper(group, all, beside);
    return [result, all] { return result; };
  }
  constexpr auto kName = "reduce-scatter";
  auto work = group.communicator().start(
      kName, x.device(), [&](c10d::Backend& backend) { return backend._reduce_scatter_base(own, all); });
  return [group, result, all, work = std::move(work)] {
    group.communicator().wait(kName, *work);
    return result;
  };
}

Tensor reduce_scatter(const Tensor& x, Rows rows, const Group& group) {
  return start_reduce_scatter(x, rows, group, /*beside=*/false)();
}

// Where each member's rows begin among all.
Counts begins_of(Rows rows) {
  Counts begins(rows.size());
  std::exclusive_scan(rows.begin(), rows.end(), begins.begin(), std::int64_t{0});
  return begins;
}

// Sends x to member `to`, and fills `into` with what member `from` sends. What comes back waits for it.
std::function<void()> start_swap(const Tensor& x, std::int64_t to, const Tensor& into, std::int64_t from,
                                 const Group& group) {
  if (x.is_meta()) {
    PaperExchanges::note(group, static_cast<double>(x.nbytes()), /*beside=*/false);
    return [] {};
  }
  Counts sent(group.size()), received(group.size());
  sent[to] = x.size(0);
  received[from] = into.size(0);
  constexpr auto kName = "swap";
  auto work = group.communicator().start(kName, x.device(), [&](c10d::Backend& backend) {
    auto in = x, out = into;
    return backend.alltoall_base(out, in, received, sent);
  });
  return [group, x, into, work = std::move(work)] { group.communicator().wait(kName, *work); };
}

Tensor all_to_all(const Tensor& x, Rows send, Rows receive, const Group& group) {
  assert(x.size(0) == sum(send));
  auto in = x.contiguous(), out = with_rows(x, sum(receive));
  Counts sent(send.begin(), send.end()), received(receive.begin(), receive.end());
  run(group, "all-to-all", in, [&](c10d::Backend& backend) { return backend.alltoall_base(out, in, received, sent); });
  return out;
}

Tensor reduce(const Tensor& x, c10d::ReduceOp::RedOpType operation, const Group& group) {
  auto result = x.clone(at::MemoryFormat::Contiguous);
  const auto exchange = [&](c10d::Backend& backend) {
    std::vector<Tensor> tensors{result};
    return backend.allreduce(tensors, {.reduceOp = operation});
  };
  run(group, "all-reduce", result, exchange, /*rounds=*/2);
  return result;
}

// An exchange and the one that its gradient takes.
struct Pair : torch::CustomClassHolder {
  using Exchange = std::function<Tensor(const Tensor&)>;
  Pair(Exchange f, Exchange b) : forward(std::move(f)), backward(std::move(b)) {}
  Exchange forward, backward;
};

class Differentiable : public torch::autograd::Function<Differentiable> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const c10::intrusive_ptr<Pair>& pair) {
    context->saved_data["pair"] = c10::IValue::make_capsule(pair);
    return pair->forward(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto pair = c10::static_intrusive_pointer_cast<Pair>(context->saved_data["pair"].toCapsule());
    return {pair->backward(grads[0]), Tensor()};
  }
};

Tensor exchange(const Tensor& x, Pair::Exchange forward, Pair::Exchange backward) {
  return Differentiable::apply(x, c10::make_intrusive<Pair>(std::move(forward), std::move(backward)));
}

}  // namespace

Tensor all_gather_rows(const Tensor& x, Rows rows, const Group& group) {
  if (group.size() == 1) return x;
  const Counts counts(rows.begin(), rows.end());
  return exchange(
      x, [=](const Tensor& own) { return gather(own, counts, group); },
      [=](const Tensor& grad) { return reduce_scatter(grad, counts, group); });
}

Tensor reduce_scatter_rows(const Tensor& x, Rows rows, const Group& group) {
  if (group.size() == 1) return x;
  const Counts counts(rows.begin(), rows.end());
  return exchange(
      x, [=](const Tensor& all) { return reduce_scatter(all, counts, group); },
      [=](const Tensor& grad) { return gather(grad, counts, group); });
}

std::function<Tensor()> start_all_gather_rows(const Tensor& x, Rows rows, const Group& group) {
  if (group.size() == 1) return [x] { return x; };
  return start_gather(x, rows, group, /*beside=*/true);
}

std::function<Tensor()> start_reduce_scatter_rows(const Tensor& x, Rows rows, const Group& group) {
  if (group.size() == 1) return [x] { return x; };
  return start_reduce_scatter(x, rows, group, /*beside=*/true);
}

// In step s each member's rows go to the s-th after it.
Tensor all_gather_rows_while(const Tensor& x, Rows rows, const Group& group, const UseRows& use) {
  const auto size = group.size(), rank = group.rank();
  const auto begins = begins_of(rows);
  if (size == 1) {
    use(0, x);
    return x;
  }
  const auto own = x.contiguous();
  const auto all = with_rows(x, sum(rows));
  const auto part = [&](std::int64_t member) { return all.narrow(0, begins[member], rows[member]); };
  std::vector<std::function<void()>> waits;
  for (std::int64_t step = 1; step < size; ++step) {
    const auto from = (rank + size - step) % size;
    waits.push_back(start_swap(own, (rank + step) % size, part(from), from, group));
  }
  part(rank).copy_(own);
  use(begins[rank], own);
  for (std::int64_t step = 1; step < size; ++step) {
    const auto from = (rank + size - step) % size;
    waits[step - 1]();
    use(begins[from], part(from));
  }
  return all;
}

Tensor reduce_scatter_rows_while(Rows rows, const Group& group, const MakeRows& make,
                                 const std::function<void()>& meanwhile) {
  const auto size = group.size(), rank = group.rank();
  const auto begins = begins_of(rows);
  std::vector<std::function<Tensor()>> parts;
  for (std::int64_t step = 1; step < size; ++step) {
    const auto to = (rank + step) % size, from = (rank + size - step) % size;
    const auto part = make(begins[to], rows[to]).contiguous();
    auto into = with_rows(part, rows[rank]);
    parts.emplace_back([wait = start_swap(part, to, into, from, group), into] {
      wait();
      return into;
    });
  }
  auto result = make(begins[rank], rows[rank]);
  meanwhile();
  for (auto& part : parts) {
    result.add_(part());
    part = nullptr;  // frees what was sent
  }
  return result;
}

Tensor all_to_all_rows(const Tensor& x, Rows send, Rows receive, const Group& group) {
  if (group.size() == 1) return x;
  const Counts sent(send.begin(), send.end()), received(receive.begin(), receive.end());
  return exchange(
      x, [=](const Tensor& own) { return all_to_all(own, sent, received, group); },
      [=](const Tensor& grad) { return all_to_all(grad, received, sent, group); });
}

Tensor all_reduce_sum(const Tensor& x, const Group& group) {
  if (group.size() == 1) return x;
  const auto add = [=](const Tensor& own) { return reduce(own, c10d::ReduceOp::SUM, group); };
  return exchange(x, add, add);
}

void all_reduce_max_(Tensor& x, const Group& group) {
  if (group.size() > 1) x.copy_(reduce(x, c10d::ReduceOp::MAX, group));
}

void broadcast_(Tensor& x, std::int64_t root, const Group& group) {
  if (group.size() == 1) return;
  auto values = x.contiguous();
  run(group, "broadcast", values, [&](c10d::Backend& backend) {
    std::vector<Tensor> tensors{values};
    return backend.broadcast(tensors, {.rootRank = root});
  });
  if (!values.is_same(x)) x.copy_(values);
}

std::vector<Counts> all_gather_numbers(const Counts& numbers, const Group& group) {
  if (group.size() == 1) return {numbers};
  if (group.is_on_paper()) return std::vector<Counts>(group.size(), numbers);  // as if all were alike
  const auto each = static_cast<std::int64_t>(numbers.size());
  const auto all = gather(at::tensor(numbers, kLong), Counts(group.size(), each), group);
  std::vector<Counts> result;
  const auto* first = all.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < group.size(); ++i, first += each) result.emplace_back(first, first + each);
  return result;
}

void barrier(const Group& group) {
  if (group.size() == 1) return;
  run(group, "barrier", at::empty({0}), [](c10d::Backend& backend) { return backend.barrier(); });
}

}  // namespace sluice
