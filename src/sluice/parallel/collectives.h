// SPDX-License-Identifier: Apache-2.0
// Exchanges of tensors within a group, differentiable. The loss that gradients are of is the sum of what all members
// compute: where a member uses another's value, its gradient goes back there and is added.
//
// Tensors are [rows, ...], on the CPU or the world's GPU; rows may differ from member to member and be 0, and all
// members know all of them. dtype and the other sizes are the same everywhere. All members make the same calls in the
// same order. In a group of one each call gives x itself.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "sluice/core/tensor.h"
#include "sluice/parallel/group.h"

namespace sluice {

using Rows = std::span<const std::int64_t>;  // of each member, by its rank

// Everyone's x, by rank: [rows[rank], ...] to [sum of rows, ...]. Backward: reduce_scatter_rows.
Tensor all_gather_rows(const Tensor& x, Rows rows, const Group& group);

// The sum over the members of x [sum of rows, ...], of which each gets its own rows: [rows[rank], ...]. Backward:
// all_gather_rows.
Tensor reduce_scatter_rows(const Tensor& x, Rows rows, const Group& group);

// The same without gradient, and beside what the caller does meanwhile: the call of what comes back waits for it and
// gives the result.
std::function<Tensor()> start_all_gather_rows(const Tensor& x, Rows rows, const Group& group);
std::function<Tensor()> start_reduce_scatter_rows(const Tensor& x, Rows rows, const Group& group);

// Both without gradient, member by member, so that the caller works on some rows while others are on their way.
// Everyone's x: `use` gets each member's rows, and where they begin in the result; own ones first, the others' when
// they have come.
using UseRows = std::function<void(std::int64_t begin, const Tensor& rows)>;
Tensor all_gather_rows_while(const Tensor& x, Rows rows, const Group& group, const UseRows& use);
// Own rows of the sum over the members: `make` gives [count, ...], the rows from `begin` on, which may be overwritten;
// own ones last. Then comes `meanwhile`.
using MakeRows = std::function<Tensor(std::int64_t begin, std::int64_t count)>;
Tensor reduce_scatter_rows_while(
    Rows rows, const Group& group, const MakeRows& make, const std::function<void()>& meanwhile = [] {});

// x [sum of send, ...] is what goes to each member, by rank; the result [sum of receive, ...] what came from each.
// receive[i] is member i's send[rank]. Backward: the same, the other way.
Tensor all_to_all_rows(const Tensor& x, Rows send, Rows receive, const Group& group);

// The sum over the members of x, any shape. Backward: the same, of the gradients.
Tensor all_reduce_sum(const Tensor& x, const Group& group);

// Without gradient, in place: the largest of each element; the values of member `root`.
void all_reduce_max_(Tensor& x, const Group& group);
void broadcast_(Tensor& x, std::int64_t root, const Group& group);

// Everyone's numbers, as many of each: the i-th of the result is member i's.
std::vector<std::vector<std::int64_t>> all_gather_numbers(const std::vector<std::int64_t>& numbers, const Group& group);

// Returns when all members have called it.
void barrier(const Group& group);

}  // namespace sluice
