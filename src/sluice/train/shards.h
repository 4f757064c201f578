// SPDX-License-Identifier: Apache-2.0
// Ranks that hold the same piece of a parameter share the work of its optimizer (ZeRO stage 1, Rajbhandari et al. 2020,
// arXiv 1910.02054): each owns some of the piece's rows, sums their gradients, updates them and hands them to the
// others. So each element of the model is owned by one rank.
#pragma once

#include <vector>

#include "sluice/layers/parameter.h"
#include "sluice/parallel/mesh.h"

namespace sluice {

class Shards {
 public:
  // The mesh must outlive it.
  Shards(std::vector<Parameter*> parameters, const Mesh& mesh);

  const Mesh& mesh() const { return mesh_; }
  std::size_t size() const { return shards_.size(); }
  Parameter& parameter(std::size_t i) const { return *shards_[i].parameter; }

  // The rows that this rank owns of x, which is laid out as the piece of parameter i: a view [rows, columns].
  Tensor own_rows(std::size_t i, const Tensor& x) const;
  // Where they lie in the whole parameter, one box below the other.
  std::vector<Box> own_boxes(std::size_t i) const;

  // From gradients of the pieces, each rank's own (undefined: 0), to the owned rows of their sums over all that hold
  // the piece. A piece that nobody else holds stays where it is.
  void reduce(std::vector<Tensor>& gradients) const;

  // Puts rows, each [rows, columns] as owned, into the parameters' values here and wherever the piece is held.
  void publish(const std::vector<Tensor>& rows) const;

 private:
  struct Shard {
    Parameter* parameter;
    std::vector<Box> boxes;      // of the piece
    std::int64_t rows, columns;  // of the piece
    const Group* holders;        // of the piece
    std::int64_t first_row(std::int64_t holder) const { return piece_begin(rows, holders->size(), holder); }
    std::int64_t elements_of(std::int64_t holder) const {
      return (first_row(holder + 1) - first_row(holder)) * columns;
    }
    Tensor rows_of(std::int64_t holder, const Tensor& piece) const;
  };
  // Parameters that the same ranks hold and that go through one exchange.
  using Bucket = std::vector<std::size_t>;
  std::vector<std::int64_t> elements_of_holders(const Bucket& bucket) const;

  const Mesh& mesh_;
  std::vector<Shard> shards_;
  std::vector<Bucket> buckets_;  // of parameters with several holders
};

}  // namespace sluice
