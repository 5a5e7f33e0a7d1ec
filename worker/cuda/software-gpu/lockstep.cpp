// Reads a kernel line by line, as cubecl writes it: one statement in a line, `if (..) {` and `for (..) {`
// too.
//
// A loop may have read and written before it comes round, so anything is possible where one begins. What a
// condition encloses counts as one statement, because lanes may part there; but not if something in it
// belongs to all lanes: then the condition is the same for all of them.

#include "lockstep.h"

#include <algorithm>
#include <cstring>
#include <regex>
#include <set>
#include <vector>

namespace gpu {

namespace {

using Names = std::set<std::string>;

// Whether any lane may have read or written since all waited for each other.
struct Since {
    bool reads = false;
    bool writes = false;
};

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines(1);
    for (char c : text) {
        lines.back() += c;
        if (c == '\n') {
            lines.emplace_back();
        }
    }
    return lines;
}

// Pointers to shared memory: those declared as such, and those made of them.
Names shared_names(const std::string& text) {
    static const std::regex made("\\b(_tmp_\\d+) = reinterpret_cast<[^>]*>\\((shared_memory_\\d+)\\)");
    static const std::regex declared("\\bshared_memory_\\d+\\b");
    Names names;
    for (std::sregex_iterator at(text.begin(), text.end(), declared), end; at != end; ++at) {
        names.insert(at->str());
    }
    for (std::sregex_iterator at(text.begin(), text.end(), made), end; at != end; ++at) {
        names.insert((*at)[1].str());
    }
    return names;
}

bool any_waits(const std::vector<std::string>& lines, size_t from, size_t to) {
    static const std::regex waiting(
        "__sync|_sync\\(|__mma_|__ldmatrix|__stmatrix|elect_sync|arrive_and_wait");
    const auto waits = [](const std::string& line) { return std::regex_search(line, waiting); };
    return std::any_of(lines.begin() + from, lines.begin() + to, waits);
}

Since accesses(const std::string& line, const Names& shared) {
    static const std::regex element("\\b(shared_memory_\\d+|_tmp_\\d+)\\[");
    const size_t start = line.find_first_not_of(" ");
    Since found;
    for (std::sregex_iterator at(line.begin(), line.end(), element), end; at != end; ++at) {
        if (shared.contains((*at)[1].str())) {
            (size_t(at->position()) == start ? found.writes : found.reads) = true;
        }
    }
    return found;
}

bool begins_with(const std::string& line, const char* word) {
    return line.compare(std::min(line.find_first_not_of(" "), line.size()), strlen(word), word) == 0;
}

// Past the block that begins in this line, and its `else`.
size_t past_block(const std::vector<std::string>& lines, size_t at) {
    int depth = 0;
    for (; at < lines.size(); at++) {
        bool closed = false;
        for (char c : lines[at]) {
            depth += c == '{';
            depth -= c == '}';
            closed |= c == '}';
        }
        const bool more = at + 1 < lines.size() && begins_with(lines[at + 1], "else");
        if (closed && depth == 0 && !more) {
            return at + 1;
        }
    }
    return at;
}

}  // namespace

std::string with_lockstep(const std::string& kernel) {
    const std::vector<std::string> lines = lines_of(kernel);
    const Names shared = shared_names(kernel);
    std::string written;
    Since since;
    for (size_t at = 0; at < lines.size();) {
        size_t next = begins_with(lines[at], "if (") ? past_block(lines, at) : at + 1;
        if (next > at + 1 && any_waits(lines, at, next)) {
            next = at + 1;
        }
        Since now;
        for (size_t i = at; i < next; i++) {
            const Since here = accesses(lines[i], shared);
            now.reads |= here.reads;
            now.writes |= here.writes;
        }
        if (any_waits(lines, at, next)) {
            since = {};
        } else if ((now.reads && since.writes) || (now.writes && since.reads)) {
            written += "lockstep(); ";
            since = now;
        } else {
            since = {since.reads || now.reads, since.writes || now.writes};
        }
        if (begins_with(lines[at], "for (") || begins_with(lines[at], "while (")) {
            since = {true, true};
        }
        for (; at < next; at++) {
            written += lines[at];
        }
    }
    return written;
}

}  // namespace GPU
