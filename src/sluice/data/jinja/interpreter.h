// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ctime>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sluice/data/jinja/ast.h"
#include "sluice/data/jinja/template.h"

namespace sluice::jinja {

// The variables of a loop's round, a macro call or the template itself, with those around it.
class Scope {
 public:
  explicit Scope(const Scope* parent) : parent_(parent) {}
  const Value* find(const std::string& name) const {
    for (const auto* scope = this; scope; scope = scope->parent_) {
      if (const auto place = scope->values_.find(name); place != scope->values_.end()) return &place->second;
    }
    return nullptr;
  }
  void set(const std::string& name, Value value) { values_[name] = std::move(value); }

 private:
  const Scope* parent_;
  std::unordered_map<std::string, Value> values_;
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

// Runs one template once. Throws Problem; line() is then where.
class Interpreter {
 public:
  Interpreter(const Limits& limits, std::time_t now)
      : steps_left_(limits.steps), bytes_left_(limits.bytes), now_(now) {}

  Output run(const Block& statements, const Dict& variables);
  int line() const { return line_; }

  // For the built-in filters, tests and functions.
  void charge_steps(std::int64_t count);
  void charge_bytes(std::size_t count);
  void charge_comparison(const Value& value);  // with any other value
  std::time_t now() const { return now_; }

 private:
  enum class Flow { kNext, kBreak, kContinue };
  struct Depth;

  Flow execute(const Block& statements, Scope& scope);
  Flow execute(const Statement& statement, Scope& scope);
  Flow execute_for(const Statement& statement, Scope& scope);
  void execute_set(const Statement& statement, Scope& scope);
  void bind(const std::vector<std::string>& names, const Value& value, Scope& scope);
  void write(const Text& text);
  Value capture(const Block& statements, Scope& scope);  // what they write, as a string

  Value evaluate(const Expression& expression, Scope& scope);
  Value evaluate_call(const Expression& expression, Scope& scope);
  Value evaluate_filter(const Expression& expression, const Value& input, Scope& scope);
  Value evaluate_compare(const Expression& expression, Scope& scope);
  Value evaluate_slice(const Expression& expression, Scope& scope);
  Value call_macro(const Statement& macro, Scope& definition, const Arguments& arguments);
  Arguments evaluate_arguments(const Expression& expression, Scope& scope);
  Value binary(const std::string& symbol, const Value& left, const Value& right);

  std::int64_t steps_left_;
  std::int64_t bytes_left_;
  std::time_t now_;
  int line_ = 1;
  int depth_ = 0;
  bool in_message_ = false;
  Output output_;
  Text* destination_ = nullptr;  // output_.text, or what capture() collects
};

}  // namespace sluice::jinja
