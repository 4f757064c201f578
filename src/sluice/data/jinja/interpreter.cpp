// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/jinja/interpreter.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "sluice/data/jinja/builtins.h"

namespace sluice::jinja {

using EKind = Expression::Kind;
using SKind = Statement::Kind;

// Nodes and macro calls within one another. A level takes well under 4 KiB of stack, so 1000 fit into any thread's.
struct Interpreter::Depth {
  explicit Depth(Interpreter& interpreter) : depth(interpreter.depth_) {
    if (++depth > 1000) throw Problem("calls and expressions nested more than 1000 deep: does a macro call itself?");
  }
  ~Depth() { --depth; }
  int& depth;
};

void Interpreter::charge_steps(std::int64_t count) {
  if (count > steps_left_)
    throw Problem("the template runs too long for this conversation: its limit of steps is used up");
  steps_left_ -= count;
}

void Interpreter::charge_bytes(std::size_t count) {
  if (count > static_cast<std::size_t>(bytes_left_))
    throw Problem("the template makes too much text: its limit of bytes is used up");
  bytes_left_ -= static_cast<std::int64_t>(count);
}

void Interpreter::charge_comparison(const Value& value) {
  const auto* list = value.list();
  charge_steps((list ? static_cast<std::int64_t>(list->elements.size()) : 0) + value.weight() / 64);
}

Output Interpreter::run(const Block& statements, const Dict& variables) {
  Scope scope(nullptr);
  for (const auto& [name, value] : variables.entries) scope.set(name.str(), value);
  destination_ = &output_.text;
  execute(statements, scope);
  return std::move(output_);
}

void Interpreter::write(const Text& text) {
  charge_bytes(text.size());
  destination_->append(text);
}

Value Interpreter::capture(const Block& statements, Scope& scope) {
  Text captured;
  auto* outer = std::exchange(destination_, &captured);
  execute(statements, scope);
  destination_ = outer;
  return captured;
}

Interpreter::Flow Interpreter::execute(const Block& statements, Scope& scope) {
  for (const auto& statement : statements) {
    const auto flow = execute(statement, scope);
    if (flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::execute(const Statement& statement, Scope& scope) {
  const Depth depth(*this);
  charge_steps(1);
  line_ = statement.line;
  switch (statement.kind) {
    case SKind::kText:
      write(Text(statement.text, Origin::kTemplate));
      return Flow::kNext;
    case SKind::kOutput: {
      const auto value = evaluate(*statement.expression, scope);
      line_ = statement.line;
      write(to_text(value));
      return Flow::kNext;
    }
    case SKind::kIf:
      for (const auto& branch : statement.branches) {
        if (!branch.condition || is_true(evaluate(*branch.condition, scope))) return execute(branch.body, scope);
      }
      return Flow::kNext;
    case SKind::kFor:
      return execute_for(statement, scope);
    case SKind::kSet:
      execute_set(statement, scope);
      return Flow::kNext;
    case SKind::kSetBlock: {
      Scope inner(&scope);
      auto value = capture(statement.body, inner);
      for (const auto& filter : statement.filters) value = evaluate_filter(*filter, value, scope);
      scope.set(statement.names[0], std::move(value));
      return Flow::kNext;
    }
    case SKind::kMacro:
      scope.set(statement.text, Callable{statement.text, nullptr, &statement, &scope});
      return Flow::kNext;
    case SKind::kBreak:
      return Flow::kBreak;
    case SKind::kContinue:
      return Flow::kContinue;
    case SKind::kBody:
      return execute(statement.body, scope);
  }
  return Flow::kNext;
}

void Interpreter::bind(const std::vector<std::string>& names, const Value& value, Scope& scope) {
  if (names.size() == 1) return scope.set(names[0], value);
  const auto elements = iterate(value);
  if (elements.size() != names.size()) {
    throw Problem(fmt::format("{} names cannot be set from {} values", names.size(), elements.size()));
  }
  for (std::size_t i = 0; i < names.size(); ++i) scope.set(names[i], elements[i]);
}

void Interpreter::execute_set(const Statement& statement, Scope& scope) {
  auto value = evaluate(*statement.expression, scope);
  line_ = statement.line;
  if (statement.attribute.empty()) return bind(statement.names, value, scope);
  const auto* target = scope.find(statement.names[0]);
  if (!target || !target->space()) {
    throw Problem(fmt::format("'set {}.{}' needs a namespace, and '{}' is {}", statement.names[0], statement.attribute,
                              statement.names[0], target ? target->type() : "undefined"));
  }
  target->space()->set(statement.attribute, std::move(value));
}

Interpreter::Flow Interpreter::execute_for(const Statement& statement, Scope& scope) {
  const auto sequence = evaluate(*statement.expression, scope);
  line_ = statement.line;
  if (const auto* text = sequence.text()) charge_bytes(text->size());
  auto elements = iterate(sequence);
  charge_steps(static_cast<std::int64_t>(elements.size()));
  if (statement.condition) {
    std::erase_if(elements, [&](const Value& element) {
      Scope inner(&scope);
      bind(statement.names, element, inner);
      return !is_true(evaluate(*statement.condition, inner));
    });
  }
  const auto count = static_cast<std::int64_t>(elements.size());
  for (std::int64_t i = 0; i < count; ++i) {
    const auto& element = elements[static_cast<std::size_t>(i)];
    Dict loop;
    const auto set = [&](std::string_view name, Value value) {
      loop.set(Text(name, Origin::kTemplate), std::move(value));
    };
    set("index", i + 1);
    set("index0", i);
    set("revindex", count - i);
    set("revindex0", count - i - 1);
    set("first", i == 0);
    set("last", i == count - 1);
    set("length", count);
    set("previtem", i > 0 ? elements[static_cast<std::size_t>(i - 1)] : Value(Undefined{"loop.previtem"}));
    set("nextitem", i + 1 < count ? elements[static_cast<std::size_t>(i + 1)] : Value(Undefined{"loop.nextitem"}));
    Scope inner(&scope);
    bind(statement.names, element, inner);
    inner.set("loop", std::move(loop));

    const int message = element.dict() ? element.dict()->message : -1;
    const bool is_block = message >= 0 && !in_message_ && destination_ == &output_.text;
    const auto begin = output_.text.size();
    in_message_ = in_message_ || is_block;
    const auto flow = execute(statement.body, inner);
    if (is_block) {
      in_message_ = false;
      if (output_.text.size() > begin) output_.blocks.push_back({message, begin, output_.text.size()});
    }
    if (flow == Flow::kBreak) break;
  }
  if (count == 0) return execute(statement.otherwise, scope);
  return Flow::kNext;
}

Value Interpreter::evaluate(const Expression& e, Scope& scope) {
  const Depth depth(*this);
  charge_steps(1);
  line_ = e.line;
  const auto operand = [&](std::size_t i) { return evaluate(*e.operands[i], scope); };
  switch (e.kind) {
    case EKind::kLiteral:
      return e.value;
    case EKind::kName: {
      if (const auto* value = scope.find(e.name)) return *value;
      if (is_function(e.name)) return Callable{e.name, nullptr, nullptr, nullptr};
      return Undefined{e.name};
    }
    case EKind::kList: {
      std::vector<Value> elements;
      for (std::size_t i = 0; i < e.operands.size(); ++i) elements.push_back(operand(i));
      return List(std::move(elements));
    }
    case EKind::kDict: {
      Dict dict;
      for (std::size_t i = 0; i < e.operands.size(); i += 2) {
        const auto key = operand(i);
        if (!key.text()) throw Problem(fmt::format("a mapping's key must be a string, got {}", key.type()));
        dict.set(*key.text(), operand(i + 1));
      }
      return dict;
    }
    case EKind::kConcat: {
      Text joined;
      for (std::size_t i = 0; i < e.operands.size(); ++i) {
        const auto piece = to_text(operand(i));
        charge_bytes(piece.size());
        joined.append(piece);
      }
      return joined;
    }
    case EKind::kAnd: {
      auto left = operand(0);
      return is_true(left) ? operand(1) : left;
    }
    case EKind::kOr: {
      auto left = operand(0);
      return is_true(left) ? left : operand(1);
    }
    case EKind::kNot:
      return !is_true(operand(0));
    case EKind::kNegate:
      return binary("-", std::int64_t{0}, operand(0));
    case EKind::kPlus:
      return binary("+", std::int64_t{0}, operand(0));
    case EKind::kBinary: {
      const auto left = operand(0);
      const auto right = operand(1);
      line_ = e.line;
      return binary(e.name, left, right);
    }
    case EKind::kCompare:
      return evaluate_compare(e, scope);
    case EKind::kTernary:
      if (is_true(operand(1))) return operand(0);
      return e.operands[2] ? operand(2) : Value(Undefined{"an 'if' without 'else'"});
    case EKind::kAttribute: {
      const auto base = operand(0);
      line_ = e.line;
      return attribute(base, e.name);
    }
    case EKind::kIndex: {
      const auto base = operand(0);
      const auto key = operand(1);
      line_ = e.line;
      if (base.text()) charge_steps(static_cast<std::int64_t>(base.text()->size()) / 64);
      return element(base, key);
    }
    case EKind::kSlice:
      return evaluate_slice(e, scope);
    case EKind::kCall:
      return evaluate_call(e, scope);
    case EKind::kFilter:
      return evaluate_filter(e, operand(0), scope);
    case EKind::kTest: {
      const auto input = operand(0);
      const auto arguments = evaluate_arguments(e, scope);
      line_ = e.line;
      charge_comparison(input);
      return call_test(e.name, input, arguments);
    }
  }
  return Undefined{};
}

Arguments Interpreter::evaluate_arguments(const Expression& expression, Scope& scope) {
  Arguments arguments;
  for (const auto& argument : expression.arguments) arguments.positional.push_back(evaluate(*argument, scope));
  for (const auto& [name, argument] : expression.named_arguments)
    arguments.named.emplace_back(name, evaluate(*argument, scope));
  return arguments;
}

Value Interpreter::evaluate_filter(const Expression& expression, const Value& input, Scope& scope) {
  const auto arguments = evaluate_arguments(expression, scope);
  line_ = expression.line;
  return call_filter(*this, expression.name, input, arguments);
}

Value Interpreter::evaluate_call(const Expression& expression, Scope& scope) {
  const auto callee = evaluate(*expression.operands[0], scope);
  const auto arguments = evaluate_arguments(expression, scope);
  line_ = expression.line;
  const auto* callable = callee.callable();
  if (!callable) {
    if (const auto* undefined = callee.as<Undefined>()) {
      throw Problem(fmt::format("'{}' is undefined or not supported, and cannot be called", undefined->name));
    }
    throw Problem(fmt::format("{} cannot be called", callee.type()));
  }
  if (callable->macro) return call_macro(*callable->macro, *callable->scope, arguments);
  if (callable->self) return call_method(*this, callable->name, *callable->self, arguments);
  return call_function(*this, callable->name, arguments);
}

Value Interpreter::call_macro(const Statement& macro, Scope& definition, const Arguments& arguments) {
  if (arguments.positional.size() > macro.names.size()) {
    throw Problem(fmt::format("macro '{}' takes {} arguments, got {}", macro.text, macro.names.size(),
                              arguments.positional.size()));
  }
  for (const auto& named : arguments.named) {
    if (std::find(macro.names.begin(), macro.names.end(), named.first) == macro.names.end()) {
      throw Problem(fmt::format("macro '{}' has no parameter '{}'", macro.text, named.first));
    }
  }
  const Depth depth(*this);
  const int line = line_;
  Scope scope(&definition);
  for (std::size_t i = 0; i < macro.names.size(); ++i) {
    const auto named = std::find_if(arguments.named.begin(), arguments.named.end(),
                                    [&](const auto& one) { return one.first == macro.names[i]; });
    if (i < arguments.positional.size()) {
      scope.set(macro.names[i], arguments.positional[i]);
    } else if (named != arguments.named.end()) {
      scope.set(macro.names[i], named->second);
    } else {
      scope.set(macro.names[i],
                macro.defaults[i] ? evaluate(*macro.defaults[i], scope) : Value(Undefined{macro.names[i]}));
    }
  }
  auto result = capture(macro.body, scope);
  line_ = line;
  return result;
}

Value Interpreter::evaluate_compare(const Expression& expression, Scope& scope) {
  auto left = evaluate(*expression.operands[0], scope);
  for (std::size_t i = 0; i < expression.names.size(); ++i) {
    auto right = evaluate(*expression.operands[i + 1], scope);
    line_ = expression.line;
    const auto& symbol = expression.names[i];
    charge_comparison(right);
    const bool holds = symbol == "=="   ? equal(left, right)
                       : symbol == "!=" ? !equal(left, right)
                       : symbol == "<"  ? less(left, right)
                       : symbol == ">"  ? less(right, left)
                       : symbol == "<=" ? less(left, right) || equal(left, right)
                       : symbol == ">=" ? less(right, left) || equal(left, right)
                       : symbol == "in" ? contains(right, left)
                                        : !contains(right, left);
    if (!holds) return false;
    left = std::move(right);
  }
  return true;
}

namespace {

// Python's slice.indices: the positions that [begin:end:step] takes out of `size`.
std::vector<std::size_t> slice_positions(std::int64_t size, const Value& begin, const Value& end,
                                         const Value& step_value) {
  const auto integer = [](const Value& value, std::int64_t otherwise) {
    if (value.is_none()) return otherwise;
    const auto* given = value.as<std::int64_t>();
    if (!given) throw Problem(fmt::format("the bound of a slice must be an integer, got {}", value.type()));
    return *given;
  };
  const auto step = std::clamp<std::int64_t>(integer(step_value, 1), -size - 1, size + 1);
  if (step == 0) throw Problem("the step of a slice is 0");
  const std::int64_t low = step > 0 ? 0 : -1;
  const std::int64_t high = step > 0 ? size : size - 1;
  const auto bound = [&](const Value& value, std::int64_t otherwise) {
    auto at = integer(value, otherwise);
    if (!value.is_none() && at < 0) at = std::max(at, -size - 1) + size;
    return std::clamp(at, low, high);
  };
  const auto first = bound(begin, step > 0 ? low : high);
  const auto last = bound(end, step > 0 ? high : low);
  std::vector<std::size_t> positions;
  for (auto at = first; step > 0 ? at < last : at > last; at += step) positions.push_back(static_cast<std::size_t>(at));
  return positions;
}

}  // namespace

Value Interpreter::evaluate_slice(const Expression& expression, Scope& scope) {
  const auto base = evaluate(*expression.operands[0], scope);
  Value bounds[3];
  for (std::size_t i = 0; i < 3; ++i) {
    bounds[i] = expression.operands[i + 1] ? evaluate(*expression.operands[i + 1], scope) : Value(None{});
  }
  line_ = expression.line;
  if (const auto* text = base.text()) {
    charge_bytes(text->size());
    const auto starts = code_point_starts(text->str());
    Text piece;
    for (const auto at :
         slice_positions(static_cast<std::int64_t>(starts.size()) - 1, bounds[0], bounds[1], bounds[2])) {
      piece.append(text->substr(starts[at], starts[at + 1] - starts[at]));
    }
    return piece;
  }
  if (const auto* list = base.list()) {
    charge_steps(static_cast<std::int64_t>(list->elements.size()));
    std::vector<Value> elements;
    for (const auto at :
         slice_positions(static_cast<std::int64_t>(list->elements.size()), bounds[0], bounds[1], bounds[2])) {
      elements.push_back(list->elements[at]);
    }
    return List(std::move(elements));
  }
  throw Problem(fmt::format("[a:b] needs a string or a list, got {}", base.type()));
}

namespace {

std::int64_t integer_binary(const std::string& symbol, std::int64_t left, std::int64_t right) {
  std::int64_t result = 0;
  bool overflow = false;
  if (symbol == "+") {
    overflow = __builtin_add_overflow(left, right, &result);
  } else if (symbol == "-") {
    overflow = __builtin_sub_overflow(left, right, &result);
  } else if (symbol == "*") {
    overflow = __builtin_mul_overflow(left, right, &result);
  } else {  // "//" and "%", which round towards minus infinity
    if (right == 0) throw Problem(fmt::format("'{}' by zero", symbol));
    if (right == -1) return symbol == "%" ? 0 : integer_binary("-", 0, left);
    const auto remainder = left % right;
    const bool adjust = remainder != 0 && (remainder < 0) != (right < 0);
    return symbol == "%" ? remainder + (adjust ? right : 0) : left / right - (adjust ? 1 : 0);
  }
  if (overflow) throw Problem(fmt::format("the result of '{}' does not fit into 64 bits", symbol));
  return result;
}

double number_binary(const std::string& symbol, double left, double right) {
  if (symbol == "+") return left + right;
  if (symbol == "-") return left - right;
  if (symbol == "*") return left * right;
  if (right == 0) throw Problem(fmt::format("'{}' by zero", symbol));
  if (symbol == "/") return left / right;
  if (symbol == "//") return std::floor(left / right);
  const auto remainder = std::fmod(left, right);
  return remainder != 0 && (remainder < 0) != (right < 0) ? remainder + right : remainder;
}

}  // namespace

Value Interpreter::binary(const std::string& symbol, const Value& left, const Value& right) {
  const auto as_integer = [](const Value& value) -> const std::int64_t* {
    static constexpr std::int64_t kBooleans[] = {0, 1};
    if (const auto* boolean = value.as<bool>()) return &kBooleans[*boolean ? 1 : 0];
    return value.as<std::int64_t>();
  };
  if (left.is_number() && right.is_number()) {
    const auto* a = as_integer(left);
    const auto* b = as_integer(right);
    if (a && b && symbol != "/") return integer_binary(symbol, *a, *b);
    return number_binary(symbol, left.number(), right.number());
  }
  if (symbol == "+" && left.text() && right.text()) {
    charge_bytes(left.text()->size() + right.text()->size());
    Text joined = *left.text();
    joined.append(*right.text());
    return joined;
  }
  if (symbol == "+" && left.list() && right.list()) {
    charge_steps(static_cast<std::int64_t>(left.list()->elements.size() + right.list()->elements.size()));
    auto elements = left.list()->elements;
    elements.insert(elements.end(), right.list()->elements.begin(), right.list()->elements.end());
    return List(std::move(elements));
  }
  if (symbol == "*" && left.text() && right.as<std::int64_t>()) {
    const auto count = std::max<std::int64_t>(*right.as<std::int64_t>(), 0);
    Text repeated;
    for (std::int64_t i = 0; i < count && !left.text()->empty(); ++i) {
      charge_bytes(left.text()->size());
      repeated.append(*left.text());
    }
    return repeated;
  }
  for (const auto* side : {&left, &right}) {
    if (const auto* undefined = side->as<Undefined>()) {
      throw Problem(fmt::format("'{}' with '{}', which is undefined", symbol, undefined->name));
    }
  }
  throw Problem(fmt::format("'{}' does not work on {} and {}", symbol, left.type(), right.type()));
}

}  // namespace sluice::jinja
