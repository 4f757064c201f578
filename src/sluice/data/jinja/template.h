// SPDX-License-Identifier: Apache-2.0
// A small Jinja: the part of the language that chat templates use, set up as transformers sets it up (trim_blocks,
// lstrip_blocks, its tojson, raise_exception and strftime_now). A template is untrusted: it runs under limits and
// reaches nothing but its variables. What is left out (include, extends, call, filter blocks, recursive loops) is
// refused by name.
#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "sluice/data/jinja/ast.h"
#include "sluice/data/jinja/value.h"

namespace sluice::jinja {

// The part of the output that a loop wrote while its variable was one of the conversation's messages (Dict::message).
struct MessageBlock {
  int message;
  std::size_t begin, end;  // bytes of the output, begin < end
};

struct Output {
  Text text;
  std::vector<MessageBlock> blocks;  // in the order of the output
};

struct Limits {
  std::int64_t steps = 20'000'000;   // evaluated nodes, loop rounds and list elements
  std::int64_t bytes = 512'000'000;  // of all strings made, so of the output too
};

class Template {
 public:
  // Data error with `name` and line if the source does not parse.
  Template(std::string source, std::string name);

  // Data error with name and line if the template fails, calls raise_exception or exceeds a limit. Safe from several
  // threads.
  Output render(const Dict& variables, const Limits& limits = {}, std::time_t now = std::time(nullptr)) const;

  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::shared_ptr<const Block> statements_;  // so that copies are cheap
};

}  // namespace sluice::jinja
