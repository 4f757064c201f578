// SPDX-License-Identifier: Apache-2.0
#include "sluice/data/jinja/parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <initializer_list>

#include "sluice/data/jinja/lexer.h"

namespace sluice::jinja {
namespace {

using Kind = Token::Kind;
using EKind = Expression::Kind;
using SKind = Statement::Kind;

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  Block run() {
    auto block = statements({});
    return block;
  }

 private:
  const Token& now() const { return tokens_[position_]; }
  const Token& ahead() const { return tokens_[std::min(position_ + 1, tokens_.size() - 1)]; }
  bool is(Kind kind, std::string_view text) const { return now().kind == kind && now().text == text; }
  bool is_operator(std::string_view text) const { return is(Kind::kOperator, text); }
  bool is_name(std::string_view text) const { return is(Kind::kName, text); }
  bool skip_operator(std::string_view text) { return is_operator(text) && ++position_; }
  bool skip_name(std::string_view text) { return is_name(text) && ++position_; }

  [[noreturn]] void fail(int line, std::string_view what) const { throw Problem(fmt::format("{}: {}", line, what)); }
  [[noreturn]] void fail_expected(std::string_view what) const {
    fail(now().line, now().kind == Kind::kEnd ? fmt::format("expected {}, but the template ends", what)
                                              : fmt::format("expected {}, got '{}'", what, now().text));
  }
  void expect_operator(std::string_view text) {
    if (!skip_operator(text)) fail_expected(fmt::format("'{}'", text));
  }
  void expect(Kind kind, std::string_view what) {
    if (now().kind != kind) fail_expected(what);
    ++position_;
  }
  std::string name(std::string_view what) {
    if (now().kind != Kind::kName) fail_expected(what);
    return tokens_[position_++].text;
  }

  // Depth of the recursion through parentheses, blocks and operators.
  struct Nesting {
    explicit Nesting(Parser& parser) : depth(parser.depth_) {
      if (++depth > kMaxDepth) parser.fail(parser.now().line, fmt::format("nested more than {} deep", kMaxDepth));
    }
    ~Nesting() { --depth; }
    int& depth;
  };

  ExpressionPtr make(EKind kind, int line, std::string text = {}) {
    auto expression = std::make_unique<Expression>();
    expression->kind = kind;
    expression->line = line;
    expression->name = std::move(text);
    return expression;
  }
  // Adds an operand. A long chain such as a.b.c... nests without recursion here, so its depth is counted as well.
  void add(Expression& parent, ExpressionPtr operand) {
    if (operand) parent.depth = std::max(parent.depth, operand->depth + 1);
    if (parent.depth > kMaxDepth) fail(parent.line, fmt::format("an expression nested more than {} deep", kMaxDepth));
    parent.operands.push_back(std::move(operand));
  }
  ExpressionPtr binary(EKind kind, int line, std::string text, ExpressionPtr left, ExpressionPtr right) {
    auto expression = make(kind, line, std::move(text));
    add(*expression, std::move(left));
    add(*expression, std::move(right));
    return expression;
  }

  // One expression, or several with commas, which make a list.
  ExpressionPtr expressions() {
    auto first = ternary();
    if (!is_operator(",")) return first;
    auto list = make(EKind::kList, first->line);
    add(*list, std::move(first));
    while (skip_operator(",")) {
      if (now().kind == Kind::kBlockEnd || now().kind == Kind::kOutputEnd) break;
      add(*list, ternary());
    }
    return list;
  }

  ExpressionPtr ternary() {
    const Nesting nesting(*this);
    auto result = disjunction();
    while (is_name("if")) {
      auto choice = make(EKind::kTernary, now().line);
      ++position_;
      add(*choice, std::move(result));
      add(*choice, disjunction());
      add(*choice, skip_name("else") ? ternary() : nullptr);
      result = std::move(choice);
    }
    return result;
  }

  ExpressionPtr disjunction() {
    auto left = conjunction();
    while (is_name("or")) {
      const int line = tokens_[position_++].line;
      left = binary(EKind::kOr, line, "or", std::move(left), conjunction());
    }
    return left;
  }

  ExpressionPtr conjunction() {
    auto left = negation();
    while (is_name("and")) {
      const int line = tokens_[position_++].line;
      left = binary(EKind::kAnd, line, "and", std::move(left), negation());
    }
    return left;
  }

  ExpressionPtr negation() {
    if (!is_name("not")) return comparison();
    const Nesting nesting(*this);
    auto expression = make(EKind::kNot, now().line);
    ++position_;
    add(*expression, negation());
    return expression;
  }

  std::string comparison_operator() {
    for (const auto* symbol : {"==", "!=", "<=", ">=", "<", ">"}) {
      if (skip_operator(symbol)) return symbol;
    }
    if (skip_name("in")) return "in";
    if (is_name("not") && ahead().kind == Kind::kName && ahead().text == "in") {
      position_ += 2;
      return "not in";
    }
    return {};
  }

  ExpressionPtr comparison() {
    auto left = sum();
    const int line = now().line;
    auto symbol = comparison_operator();
    if (symbol.empty()) return left;
    auto chain = make(EKind::kCompare, line);
    add(*chain, std::move(left));
    for (; !symbol.empty(); symbol = comparison_operator()) {
      chain->names.push_back(symbol);
      add(*chain, sum());
    }
    return chain;
  }

  template <typename Operand>
  ExpressionPtr left_chain(std::initializer_list<const char*> symbols, Operand operand) {
    auto left = operand();
    while (true) {
      const auto* found =
          std::find_if(symbols.begin(), symbols.end(), [&](const char* symbol) { return is_operator(symbol); });
      if (found == symbols.end()) return left;
      const int line = tokens_[position_++].line;
      left = binary(EKind::kBinary, line, *found, std::move(left), operand());
    }
  }
  ExpressionPtr sum() {
    return left_chain({"+", "-"}, [this] { return concatenation(); });
  }
  ExpressionPtr product() {
    return left_chain({"*", "/", "//", "%"}, [this] { return unary(true); });
  }

  ExpressionPtr concatenation() {
    auto first = product();
    if (!is_operator("~")) return first;
    auto expression = make(EKind::kConcat, now().line);
    add(*expression, std::move(first));
    while (skip_operator("~")) add(*expression, product());
    return expression;
  }

  ExpressionPtr unary(bool with_filters) {
    const Nesting nesting(*this);
    ExpressionPtr expression;
    if (is_operator("-") || is_operator("+")) {
      expression = make(is_operator("-") ? EKind::kNegate : EKind::kPlus, now().line);
      ++position_;
      add(*expression, unary(false));
    } else {
      expression = primary();
    }
    expression = postfix(std::move(expression));
    return with_filters ? filters_and_tests(std::move(expression)) : std::move(expression);
  }

  ExpressionPtr primary() {
    const auto& token = now();
    if (token.kind == Kind::kName) return name_or_constant();
    if (token.kind == Kind::kString) {
      std::string text;
      while (now().kind == Kind::kString) text += tokens_[position_++].text;
      return literal(token.line, Text(text, Origin::kTemplate));
    }
    if (token.kind == Kind::kInteger) {
      std::int64_t integer = 0;
      const auto* end = token.text.data() + token.text.size();
      if (std::from_chars(token.text.data(), end, integer).ec != std::errc())
        fail(token.line, "integer of more than 64 bits");
      ++position_;
      return literal(token.line, integer);
    }
    if (token.kind == Kind::kFloat) {
      double number = 0;
      std::from_chars(token.text.data(), token.text.data() + token.text.size(), number);
      ++position_;
      return literal(token.line, number);
    }
    if (skip_operator("(")) return parenthesized(token.line);
    if (skip_operator("[")) {
      auto list = make(EKind::kList, token.line);
      while (!skip_operator("]")) {
        add(*list, ternary());
        if (!is_operator("]")) expect_operator(",");
      }
      return list;
    }
    if (skip_operator("{")) {
      auto dict = make(EKind::kDict, token.line);
      while (!skip_operator("}")) {
        add(*dict, ternary());
        expect_operator(":");
        add(*dict, ternary());
        if (!is_operator("}")) expect_operator(",");
      }
      return dict;
    }
    fail_expected("an expression");
  }

  ExpressionPtr literal(int line, Value value) {
    auto expression = make(EKind::kLiteral, line);
    expression->value = std::move(value);
    return expression;
  }

  ExpressionPtr name_or_constant() {
    const auto& token = tokens_[position_++];
    if (token.text == "true" || token.text == "True") return literal(token.line, true);
    if (token.text == "false" || token.text == "False") return literal(token.line, false);
    if (token.text == "none" || token.text == "None") return literal(token.line, None{});
    return make(EKind::kName, token.line, token.text);
  }

  // Behind "(": an expression, or a tuple, which is a list here.
  ExpressionPtr parenthesized(int line) {
    if (skip_operator(")")) return make(EKind::kList, line);
    auto first = ternary();
    if (skip_operator(")")) return first;
    auto list = make(EKind::kList, line);
    add(*list, std::move(first));
    while (!skip_operator(")")) {
      expect_operator(",");
      if (!is_operator(")")) add(*list, ternary());
    }
    return list;
  }

  ExpressionPtr postfix(ExpressionPtr expression) {
    while (true) {
      const int line = now().line;
      if (skip_operator(".")) {
        if (now().kind == Kind::kInteger) {
          expression = binary(EKind::kIndex, line, "", std::move(expression), primary());
        } else {
          auto attribute = make(EKind::kAttribute, line, name("an attribute's name behind '.'"));
          add(*attribute, std::move(expression));
          expression = std::move(attribute);
        }
      } else if (skip_operator("[")) {
        expression = subscript(std::move(expression), line);
      } else if (is_operator("(")) {
        auto call = make(EKind::kCall, line);
        add(*call, std::move(expression));
        arguments(*call);
        expression = std::move(call);
      } else {
        return expression;
      }
    }
  }

  ExpressionPtr subscript(ExpressionPtr base, int line) {
    ExpressionPtr bounds[3];
    int colons = 0;
    while (!is_operator("]")) {
      if (skip_operator(":")) {
        if (++colons > 2) fail_expected("']'");
      } else if (!bounds[colons]) {
        bounds[colons] = ternary();
      } else {
        fail_expected("']'");
      }
    }
    ++position_;
    if (colons == 0) {
      if (!bounds[0]) fail(line, "an index is missing between '[' and ']'");
      return binary(EKind::kIndex, line, "", std::move(base), std::move(bounds[0]));
    }
    auto slice = make(EKind::kSlice, line);
    add(*slice, std::move(base));
    for (auto& bound : bounds) add(*slice, std::move(bound));
    return slice;
  }

  // "(a, b, key=c)" into arguments and named_arguments.
  void arguments(Expression& call) {
    expect_operator("(");
    const auto deepen = [&](const Expression& argument) {
      call.depth = std::max(call.depth, argument.depth + 1);
      if (call.depth > kMaxDepth) fail(call.line, fmt::format("an expression nested more than {} deep", kMaxDepth));
    };
    while (!skip_operator(")")) {
      if (is_operator("*") || is_operator("**")) fail(now().line, "unpacking of arguments is not supported");
      if (now().kind == Kind::kName && ahead().kind == Kind::kOperator && ahead().text == "=") {
        auto key = name("an argument's name");
        ++position_;
        call.named_arguments.emplace_back(std::move(key), ternary());
        deepen(*call.named_arguments.back().second);
      } else {
        if (!call.named_arguments.empty()) fail(now().line, "an argument without a name follows one with a name");
        call.arguments.push_back(ternary());
        deepen(*call.arguments.back());
      }
      if (!is_operator(")")) expect_operator(",");
    }
  }

  ExpressionPtr filters_and_tests(ExpressionPtr expression) {
    while (true) {
      if (is_operator("|")) {
        expression = filter(std::move(expression));
      } else if (is_name("is")) {
        expression = test(std::move(expression));
      } else if (is_operator("(")) {
        expression = postfix(std::move(expression));
      } else {
        return expression;
      }
    }
  }

  ExpressionPtr filter(ExpressionPtr operand) {
    const int line = now().line;
    expect_operator("|");
    auto filtered = make(EKind::kFilter, line, name("a filter's name behind '|'"));
    add(*filtered, std::move(operand));
    if (is_operator("(")) arguments(*filtered);
    return filtered;
  }

  // "is [not] name", "is name(arguments)" or "is name argument".
  ExpressionPtr test(ExpressionPtr operand) {
    const int line = now().line;
    ++position_;
    const bool negated = skip_name("not");
    auto expression = make(EKind::kTest, line, name("a test's name behind 'is'"));
    add(*expression, std::move(operand));
    if (is_operator("(")) {
      arguments(*expression);
    } else if (starts_argument()) {
      expression->arguments.push_back(postfix(primary()));
      expression->depth = std::max(expression->depth, expression->arguments.back()->depth + 1);
    }
    if (!negated) return expression;
    auto outer = make(EKind::kNot, line);
    add(*outer, std::move(expression));
    return outer;
  }
  bool starts_argument() const {
    if (now().kind == Kind::kString || now().kind == Kind::kInteger || now().kind == Kind::kFloat) return true;
    if (is_operator("[") || is_operator("{")) return true;
    static constexpr std::string_view kKeywords[] = {"else", "or", "and", "is", "if", "in", "not"};
    return now().kind == Kind::kName &&
           std::find(std::begin(kKeywords), std::end(kKeywords), now().text) == std::end(kKeywords);
  }

  // Up to a block that one of `endings` begins; that name is left as the current token, behind its "{%".
  Block statements(std::initializer_list<std::string_view> endings) {
    const Nesting nesting(*this);
    Block block;
    while (now().kind != Kind::kEnd) {
      const auto& token = tokens_[position_++];
      if (token.kind == Kind::kText) {
        block.push_back(make_statement(SKind::kText, token.line));
        block.back().text = token.text;
      } else if (token.kind == Kind::kOutputBegin) {
        block.push_back(make_statement(SKind::kOutput, token.line));
        block.back().expression = expressions();
        expect(Kind::kOutputEnd, "'}}'");
      } else {
        if (std::any_of(endings.begin(), endings.end(), [&](auto ending) { return is_name(ending); })) return block;
        block.push_back(statement(token.line));
      }
    }
    return block;
  }

  static Statement make_statement(SKind kind, int line) {
    Statement statement;
    statement.kind = kind;
    statement.line = line;
    return statement;
  }
  void end_tag() { expect(Kind::kBlockEnd, "'%}'"); }
  void closing(int line, std::string_view opened, std::string_view end) {
    if (!skip_name(end)) fail(line, fmt::format("'{}' is not closed by '{}'", opened, end));
    end_tag();
  }

  Statement statement(int line) {
    const auto keyword = name("a statement");
    if (keyword == "if") return if_statement(line);
    if (keyword == "for") return for_statement(line);
    if (keyword == "set") return set_statement(line);
    if (keyword == "macro") return macro_statement(line);
    if (keyword == "break" || keyword == "continue") {
      if (loops_ == 0) fail(line, fmt::format("'{}' stands outside of a loop", keyword));
      end_tag();
      return make_statement(keyword == "break" ? SKind::kBreak : SKind::kContinue, line);
    }
    if (keyword == "generation") {
      end_tag();
      auto result = make_statement(SKind::kBody, line);
      result.body = statements({"endgeneration"});
      closing(line, keyword, "endgeneration");
      return result;
    }
    fail(line, fmt::format("the statement '{}' is unknown, not supported, or closes nothing here", keyword));
  }

  Statement if_statement(int line) {
    auto result = make_statement(SKind::kIf, line);
    bool more = true;
    bool has_else = false;
    while (more) {
      Statement::Branch branch;
      if (!has_else) branch.condition = ternary();
      end_tag();
      branch.body = statements({"elif", "else", "endif"});
      result.branches.push_back(std::move(branch));
      more = !has_else && (is_name("elif") || is_name("else"));
      has_else = has_else || is_name("else");
      if (more) ++position_;
    }
    closing(line, "if", "endif");
    return result;
  }

  Statement for_statement(int line) {
    auto result = make_statement(SKind::kFor, line);
    result.names = targets();
    if (!skip_name("in")) fail_expected("'in'");
    result.expression = disjunction();
    if (skip_name("if")) result.condition = ternary();
    if (is_name("recursive")) fail(line, "recursive loops are not supported");
    end_tag();
    ++loops_;
    result.body = statements({"else", "endfor"});
    --loops_;
    if (skip_name("else")) {
      end_tag();
      result.otherwise = statements({"endfor"});
    }
    closing(line, "for", "endfor");
    return result;
  }

  std::vector<std::string> targets() {
    const bool parentheses = skip_operator("(");
    std::vector<std::string> names = {name("a variable's name")};
    while (skip_operator(",")) names.push_back(name("a variable's name"));
    if (parentheses) expect_operator(")");
    return names;
  }

  Statement set_statement(int line) {
    auto result = make_statement(SKind::kSet, line);
    result.names = targets();
    if (result.names.size() == 1 && skip_operator(".")) result.attribute = name("an attribute's name behind '.'");
    if (skip_operator("=")) {
      result.expression = expressions();
      end_tag();
      return result;
    }
    result.kind = SKind::kSetBlock;
    if (result.names.size() != 1 || !result.attribute.empty()) fail_expected("'='");
    while (is_operator("|")) result.filters.push_back(filter(nullptr));
    end_tag();
    const int loops = std::exchange(loops_, 0);  // what is captured cannot break the loop around it
    result.body = statements({"endset"});
    loops_ = loops;
    closing(line, "set", "endset");
    return result;
  }

  Statement macro_statement(int line) {
    auto result = make_statement(SKind::kMacro, line);
    result.text = name("the macro's name");
    expect_operator("(");
    while (!skip_operator(")")) {
      result.names.push_back(name("a parameter's name"));
      result.defaults.push_back(skip_operator("=") ? ternary() : nullptr);
      if (!result.defaults.back() && result.defaults.size() > 1 && result.defaults[result.defaults.size() - 2]) {
        fail(line, fmt::format("parameter '{}' without a default follows one with a default", result.names.back()));
      }
      if (!is_operator(")")) expect_operator(",");
    }
    end_tag();
    const int loops = std::exchange(loops_, 0);
    result.body = statements({"endmacro"});
    loops_ = loops;
    closing(line, "macro", "endmacro");
    return result;
  }

  std::vector<Token> tokens_;
  std::size_t position_ = 0;
  int depth_ = 0;
  int loops_ = 0;
};

}  // namespace

Block parse(std::string_view source) { return Parser(tokenize(source)).run(); }

}  // namespace sluice::jinja
