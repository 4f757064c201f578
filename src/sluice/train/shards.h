// SPDX-License-Identifier: Apache-2.0
// Ranks that hold the same piece of a parameter share the work of its optimizer (ZeRO stage 1, Rajbhandari et al. 2020,
// arXiv 1910.02054): each owns some of the piece's rows, sums their gradients, updates them and hands them to the
// others. So each element of the model is owned by one rank.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "sluice/layers/parameter.h"
#include "sluice/parallel/mesh.h"

namespace sluice {

class Shards {
 public:
  // Most elements of a bucket of more than one parameter: 32 MiB in float32, from where on an exchange runs at full
  // speed.
  static constexpr std::int64_t kBucketElements = 8 << 20;

  // The mesh must outlive it.
  Shards(const std::vector<Parameter*>& parameters, const Mesh& mesh, std::int64_t bucket_elements = kBucketElements);

  const Mesh& mesh() const { return mesh_; }
  std::size_t size() const { return shards_.size(); }
  Parameter& parameter(std::size_t i) const { return *shards_[i].parameter; }

  // The rows that this rank owns of x, which is laid out as the piece of parameter i: a view [rows, columns].
  Tensor own_rows(std::size_t i, const Tensor& x) const;
  // Where they lie in the whole parameter, one box below the other.
  std::vector<Box> own_boxes(std::size_t i) const;

  // Parameters that the same ranks hold go through one exchange together, as a bucket. Buckets come in the order in
  // which a backward pass completes them: what is declared last comes first. It is the same on every rank.
  using Bucket = std::vector<std::size_t>;
  const std::vector<Bucket>& buckets() const { return buckets_; }
  // None for a parameter whose piece nobody else holds.
  std::optional<std::size_t> bucket_of(std::size_t i) const { return shards_[i].bucket; }

  // Takes the gradients of a bucket's pieces out of `gradients`, this rank's own (undefined: 0), and starts to sum them
  // over all that hold the pieces. The call of what comes back waits, and gives the sums' owned rows, [rows, columns]
  // of each parameter of the bucket.
  using Sums = std::function<std::vector<Tensor>()>;
  Sums start_sum(const Bucket& bucket, std::vector<Tensor>& gradients) const;

  // Puts the owned rows of the parameters' values into the values wherever the piece is held.
  void publish() const;

 private:
  struct Shard {
    Parameter* parameter;
    std::vector<Box> boxes;      // of the piece
    std::int64_t rows, columns;  // of the piece
    const Group* holders;        // of the piece
    std::optional<std::size_t> bucket = {};
    std::int64_t first_row(std::int64_t holder) const { return piece_begin(rows, holders->size(), holder); }
    std::int64_t elements_of(std::int64_t holder) const {
      return (first_row(holder + 1) - first_row(holder)) * columns;
    }
    Tensor rows_of(std::int64_t holder, const Tensor& piece) const;
  };
  std::vector<std::int64_t> elements_of_holders(const Bucket& bucket) const;

  const Mesh& mesh_;
  std::vector<Shard> shards_;
  std::vector<Bucket> buckets_;
};

}  // namespace sluice
