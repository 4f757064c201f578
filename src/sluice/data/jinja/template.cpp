// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/jinja/template.h"

#include "sluice/core/error.h"
#include "sluice/data/jinja/interpreter.h"
#include "sluice/data/jinja/parser.h"
#include "sluice/data/utf8.h"

namespace sluice::jinja {

Template::Template(std::string source, std::string name) : name_(std::move(name)) {
  if (source.size() > (std::size_t{1} << 20))
    fail_data("{}: the template has {} bytes; at most 1 MiB is read", name_, source.size());
  check_utf8(source, name_);
  for (std::size_t at = 0; (at = source.find("\r\n", at)) != std::string::npos;) source.erase(at, 1);
  if (source.ends_with('\n')) source.pop_back();
  try {
    statements_ = std::make_shared<const Block>(parse(source));
  } catch (const Problem& problem) {
    fail_data("{}:{}", name_, problem.what());
  }
}

Output Template::render(const Dict& variables, const Limits& limits, std::time_t now) const {
  Interpreter interpreter(limits, now);
  try {
    return interpreter.run(*statements_, variables);
  } catch (const Problem& problem) {
    fail_data("{}:{}: {}", name_, interpreter.line(), problem.what());
  }
}

}  // namespace sluice::jinja
