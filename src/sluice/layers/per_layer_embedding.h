// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sluice/layers/grouped_rms_norm.h"
#include "sluice/layers/linear.h"
#include "sluice/layers/mixer.h"
#include "sluice/layers/ngram_hash.h"
#include "sluice/layers/pack_pieces.h"

namespace sluice {

// Rows of a hashed n-gram table for each token, side by side. The table is frozen and stays where it is stored: only
// the rows that are asked for are read, out of the mapped file or the host's memory. Of a mesh, each expert rank reads
// a part of the rows for all: so much of the file comes into its machine's memory, where processes share it. Pe
// embedding size.
class NgramEmbedding : public Module {
 public:
  NgramEmbedding(const NgramHashSizes& hash, std::int64_t embedding_size, double initializer_range);

  // Pe values for each token of a piece of the pack, [T, Pe]; `tokens` are of the whole pack, `activations`: their
  // dtype and device. The ranks that `readers` holds call it together, each for its own piece. A sequence begins after
  // an end of sequence, whatever stands before it in the pack; one that continues a slot has the `history` [slots, N -
  // 1] int64 before it, which is updated and lies in the host's memory.
  Tensor forward(const Tensor& tokens, const Pack& pack, const PackPiece& piece, Tensor* history,
                 const at::TensorOptions& activations, const Group& readers) const;
  const NgramHash& hash() const { return hash_; }

 private:
  // The rows of these numbers, [R, Pe / heads].
  Tensor read(const std::vector<std::int64_t>& rows, const at::TensorOptions& activations) const;
  Tensor read_by_ranks(const std::vector<std::int64_t>& rows, const at::TensorOptions& activations,
                       const Group& readers) const;

  NgramHash hash_;
  Parameter &layer_multipliers_, &ngram_heads_vocab_sizes_, &ngram_heads_offsets_;  // the hash's constants, int64
  Parameter& table_;                                                                // [rows, Pe / heads]
};

struct PerLayerEmbeddingSizes {
  std::int64_t hidden_size, streams;
  std::int64_t embedding_size;  // Pe
  std::int64_t conv_kernel_dim;
  NgramHashSizes hash;
  double rms_norm_eps;
  double initializer_range;
};

// Adds hashed n-gram features to the residual streams (Qwen3.8-Flash-Next's per-layer embedding). With e the n-gram
// embedding, h [T, n, D] the streams, and norms over each stream:
//   gate_s = f( norm(W_k e)_s . norm(h)_s / sqrt(D) )    f(x) = sigmoid( sign(x) sqrt(max(|x|, 1e-6)) )
//   G_s = gate_s W_v e                                   out = G + silu(conv(norm(G)))
// conv is causal and depthwise with dilation N, the largest n-gram order. f is steep at 0: the gradient of gate_s with
// respect to its argument is up to 125, so an error of rounding in the argument is amplified by as much.
class PerLayerEmbedding : public Mixer {
 public:
  explicit PerLayerEmbedding(const PerLayerEmbeddingSizes& sizes);
  Tensor forward(const Tensor& streams, const ForwardContext& context, MixerState* state) const override;  // [T, n D]
  std::unique_ptr<MixerState> new_state(std::int64_t slots, std::int64_t capacity,
                                        const at::TensorOptions& activations) const override;
  std::string why_not_on_gpu(at::ScalarType) const override { return ""; }
  bool is_recordable() const override { return false; }  // its table lies with the host
  void count_operations(std::span<const std::int64_t> lengths, Operations& operations) const override;
  std::int64_t table_rows() const { return ple_embedding_.hash().table_rows(); }

 private:
  PerLayerEmbeddingSizes sizes_;
  NgramEmbedding& ple_embedding_;
  Linear &key_proj_, &value_proj_;  // [n D, Pe], [D, Pe]
  GroupedRmsNorm &norm_key_, &norm_query_, &norm_conv_;
  Parameter& conv_weight_;  // [n D, 1, kernel]
};

}  // namespace sluice
