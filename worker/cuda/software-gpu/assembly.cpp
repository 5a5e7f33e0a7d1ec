// asm("template" : "=constraint"(output) : "constraint"(input) : "clobbered"), as far as cubecl writes it:
// without names for operands, and with no register that is only declared in the template, but as the
// condition between two instructions.

#include "assembly.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <vector>

namespace gpu {

namespace {

bool is_of_word(char c) { return isalnum(static_cast<unsigned char>(c)) || c == '_'; }

// Past the string literal that begins here.
size_t past_literal(const std::string& text, size_t at) {
    for (at++; at < text.size() && text[at] != '"'; at++) {
        at += text[at] == '\\';
    }
    return at + 1;
}

// Text between brackets, divided at a separator that is not within brackets or literals. `at` is after the
// opening bracket, and then after the closing one.
std::vector<std::string> divided(const std::string& text, size_t& at, char separator) {
    std::vector<std::string> parts(1);
    for (int depth = 0; at < text.size();) {
        const size_t start = at;
        at = text[at] == '"' ? past_literal(text, at) : at + 1;
        if (text[start] == ')' && depth-- == 0) {
            break;
        }
        depth += text[start] == '(';
        if (text[start] == separator && depth == 0) {
            parts.emplace_back();
        } else {
            parts.back() += text.substr(start, at - start);
        }
    }
    return parts;
}

// What all literals of a text say together.
std::string message(const std::string& text) {
    std::string whole;
    for (size_t at = 0; at < text.size();) {
        if (text[at] != '"') {
            at++;
            continue;
        }
        const size_t end = past_literal(text, at);
        for (at++; at + 1 < end; at++) {
            const bool escape = text[at] == '\\';
            at += escape;
            whole += escape && (text[at] == 'n' || text[at] == 't') ? ' ' : text[at];
        }
        at = end;
    }
    return whole;
}

// The expressions of `"constraint"(expression), ...`.
void append_operands(const std::string& text, std::vector<std::string>& operands) {
    size_t at = 0;
    for (const std::string& one : divided(text + ")", at, ',')) {
        const size_t open = one.find('('), close = one.rfind(')');
        if (open != std::string::npos && close != std::string::npos) {
            operands.push_back(one.substr(open, close + 1 - open));
        }
    }
}

struct Call {
    std::string name;
    std::vector<std::string> arguments;
};

// Adds one instruction: its name up to the first space, then operands (%0) and numbers.
void append_instruction(const std::string& text, const std::vector<std::string>& operands, Call& call) {
    size_t at = text.find_first_not_of(" {}");
    if (at == std::string::npos || text.compare(at, 4, ".reg") == 0) {
        return;
    }
    call.name += call.name.empty() ? "" : "__";
    for (; at < text.size() && text[at] != ' '; at++) {
        call.name += is_of_word(text[at]) ? text[at] : '_';
    }
    while (at < text.size()) {
        const size_t start = at;
        const bool word = is_of_word(text[at]);
        for (at++; at < text.size() && (word || text[start] == '%') && is_of_word(text[at]); at++) {
        }
        const std::string token = text.substr(start, at - start);
        if (token.size() > 1 && token[0] == '%') {
            const size_t number = strtoul(token.c_str() + 1, nullptr, 10);
            const bool known = isdigit(token[1]) && number < operands.size();
            call.arguments.push_back(known ? operands[number] : "operand_that_is_not_there");
        } else if (token == "%" && at < text.size() && text[at] == '%') {
            // A register of the template.
            for (at++; at < text.size() && is_of_word(text[at]); at++) {
            }
        } else if (isdigit(token[0])) {
            call.arguments.push_back(token);
        } else if (word && token != "_") {
            call.arguments.push_back("word_that_is_not_understood_" + token);
        }
    }
}

std::string call_of(const std::vector<std::string>& sections) {
    std::vector<std::string> operands;
    for (size_t section = 1; section < sections.size() && section < 3; section++) {
        append_operands(sections[section], operands);
    }
    Call call;
    std::string instructions = message(sections[0]);
    for (size_t start = 0; start < instructions.size();) {
        const size_t end = std::min(instructions.find(';', start), instructions.size());
        append_instruction(instructions.substr(start, end - start), operands, call);
        start = end + 1;
    }
    std::string written = "ptx::" + call.name + "(";
    for (const std::string& argument : call.arguments) {
        written += (written.back() == '(' ? "" : ", ") + argument;
    }
    return written + ")";
}

// Where the next `asm` begins that is a word of its own.
size_t next_assembly(const std::string& source, size_t from) {
    for (size_t at = from; (at = source.find("asm", at)) != std::string::npos; at++) {
        const bool begins = at == 0 || !is_of_word(source[at - 1]);
        if (begins && at + 3 < source.size() && !is_of_word(source[at + 3])) {
            return at;
        }
    }
    return std::string::npos;
}

}  // namespace

std::string without_assembly(const std::string& source) {
    std::string written;
    size_t done = 0;
    for (size_t at; (at = next_assembly(source, done)) != std::string::npos;) {
        written += source.substr(done, at - done);
        done = source.find('(', at) + 1;
        written += call_of(divided(source, done, ':'));
    }
    return written + source.substr(done);
}

}  // namespace GPU
