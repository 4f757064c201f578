// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <utility>

#include "sluice/layers/parameter.h"
#include "sluice/parallel/mesh.h"

namespace sluice {

// The values of parameters that the ranks of a mesh hold in pieces, put together on rank 0, a few at a time. The
// parameters and the mesh must outlive it.
class WholeValues {
 public:
  explicit WholeValues(const Mesh& mesh = one_process()) : mesh_(mesh) {}

  // The whole value in CPU memory on rank 0; undefined on the others. All ranks ask for the same parameters in the same
  // order. Of one process it shares memory with the parameter where it can.
  Tensor of(const Parameter& parameter);

  bool is_writer() const { return mesh_.world().rank() == 0; }
  const Mesh& mesh() const { return mesh_; }

 private:
  Tensor gather(const Parameter& parameter) const;

  const Mesh& mesh_;
  // Those last asked for: a tensor on disk may be made of several, and several of one, in turns.
  std::deque<std::pair<const Parameter*, Tensor>> kept_;
};

}  // namespace sluice
