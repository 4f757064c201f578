// SPDX-License-Identifier: Apache-2.0
// How a parameter is split over the ranks of a mesh. A split is declared with the parameter, in numbers of the whole;
// which piece a rank holds follows from its place alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sluice/core/tensor.h"
#include "sluice/parallel/mesh.h"

namespace sluice {

struct Parameter;  // layers/parameter.h

struct Split {
  enum class Over { kNothing, kTensor, kExperts };  // the axis of the mesh along which ranks hold different pieces
  Over over = Over::kNothing;
  std::int64_t dim = 0;    // the first, or of a matrix the last
  std::int64_t units = 0;  // heads or experts, between which it is cut into equal pieces; 0: it may be cut anywhere
  bool shared = false;     // fewer units than ranks: neighbouring ranks hold the same piece
  std::vector<std::int64_t> parts = {};  // lengths along dim, each of which is cut by itself; none: dim is one part

  // Rows, or columns, that belong to heads. `parts`: stretches of rows, such as those of q, k and v.
  static Split heads(std::int64_t dim, std::int64_t count, std::vector<std::int64_t> parts = {}) {
    return {.over = Over::kTensor, .dim = dim, .units = count, .parts = std::move(parts)};
  }
  // Key-value heads, of which there may be fewer than ranks.
  static Split key_value_heads(std::int64_t dim, std::int64_t count) {
    return {.over = Over::kTensor, .dim = dim, .units = count, .shared = true};
  }
  static Split anywhere(std::int64_t dim) { return {.over = Over::kTensor, .dim = dim}; }
  static Split experts(std::int64_t count) { return {.over = Over::kExperts, .dim = 0, .units = count}; }
};

// Where a rank stands along the axes that split parameters.
struct MeshPlace {
  struct Axis {
    std::int64_t rank = 0, size = 1;
  };
  Axis tensor = {}, expert = {};
};

MeshPlace place_of(const Mesh& mesh);

// Where the i-th of `pieces` pieces of `length` begins; that of i = pieces is the end. Sizes differ by at most one.
constexpr std::int64_t piece_begin(std::int64_t length, std::int64_t pieces, std::int64_t i) {
  return length * i / pieces;
}

// How many different pieces there are of a parameter.
std::int64_t count_pieces(const Split& split, const MeshPlace& place);

// A rectangle of a parameter's 2-D view [rows, columns]: columns are its last dimension, or 1 where it has only one.
struct Box {
  std::int64_t row, rows, column, columns;
  std::int64_t elements() const { return rows * columns; }
};
Box whole_box(std::span<const std::int64_t> shape);
// What two boxes share; of no elements where they share nothing.
Box intersection(const Box& a, const Box& b);
// x in the 2-D view.
Tensor rows_view(const Tensor& x);

// The boxes of the whole parameter that lie one below the other in the piece at `place`.
std::vector<Box> boxes_of(const Parameter& parameter, const MeshPlace& place);
std::vector<std::int64_t> local_shape(const Parameter& parameter, const MeshPlace& place);

// The piece out of a parameter's whole value: a view where it is one stretch of memory.
Tensor take_piece(const Tensor& whole, const Parameter& parameter, const MeshPlace& place);

// Usage error unless meshes of these sizes can hold the parameters; it names what does not divide, and the sizes that
// would do.
void check_splits(const std::vector<Parameter*>& parameters, std::int64_t tensor_ranks, std::int64_t expert_ranks);

}  // namespace sluice
