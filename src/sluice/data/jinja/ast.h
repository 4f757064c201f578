// SPDX-License-Identifier: Apache-2.0
// The parsed template. Expressions may nest kMaxDepth deep (value.h); so evaluation and destruction fit the stack.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "sluice/data/jinja/value.h"

namespace sluice::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

struct Expression {
  enum class Kind {
    kLiteral,  // value
    kName,     // name
    kList,     // operands
    kDict,     // operands: key, value, key, value...
    kConcat,   // operands joined by ~
    kAnd,
    kOr,   // two operands
    kNot,  // one
    kNegate,
    kPlus,
    kBinary,     // name is the operator: + - * / // %
    kCompare,    // operands[0] names[0] operands[1] names[1] operands[2]...: == != < <= > >= in, not in
    kTernary,    // then, condition, otherwise (may be null)
    kAttribute,  // operands[0].name
    kIndex,      // operands[0][operands[1]]
    kSlice,      // operands[0][begin:end:step], each of the three may be null
    kCall,       // operands[0](arguments)
    kFilter,     // operands[0] | name(arguments)
    kTest,       // operands[0] is name(arguments)
  };
  Kind kind;
  int line;
  int depth = 1;
  std::string name;
  std::vector<std::string> names;
  Value value;
  std::vector<ExpressionPtr> operands;
  std::vector<ExpressionPtr> arguments;  // by position
  std::vector<std::pair<std::string, ExpressionPtr>> named_arguments;
};

struct Statement;
using Block = std::vector<Statement>;

struct Statement {
  enum class Kind {
    kText,      // text
    kOutput,    // {{ expression }}
    kIf,        // branches; the last may have no condition
    kFor,       // for names in expression [if condition]: body, otherwise
    kSet,       // set names = expression, or set name.attribute = expression
    kSetBlock,  // set name: body, through the filters, which have no operand
    kMacro,     // text is its name; names and defaults (null: none) its parameters; body
    kBreak,
    kContinue,
    kBody,  // body, as it stands: {% generation %}
  };
  struct Branch {
    ExpressionPtr condition;
    std::vector<Statement> body;
  };
  Kind kind;
  int line;
  std::string text;
  std::string attribute;
  std::vector<std::string> names;
  std::vector<ExpressionPtr> defaults, filters;
  ExpressionPtr expression, condition;
  std::vector<Branch> branches;
  std::vector<Statement> body, otherwise;
};

}  // namespace sluice::jinja
