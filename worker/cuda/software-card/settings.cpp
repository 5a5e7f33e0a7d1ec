// The environment, read.

#include "settings.h"

#include <cstdio>
#include <cstdlib>

namespace card {

namespace {

std::string variable(const char* name) {
    const char* value = getenv(name);
    return value ? value : "";
}

uint64_t number(const char* name, uint64_t otherwise) {
    const std::string value = variable(name);
    return value.empty() ? otherwise : strtoull(value.c_str(), nullptr, 10);
}

Settings read_settings() {
    Settings settings;
    settings.execute = variable("CARD_MODE") != "count";
    settings.capability = int(number("CARD_CAPABILITY", 60));
    settings.memory_bytes = number("CARD_MEMORY_MIB", 141 << 10) << 20;
    settings.cards = int(number("CARD_CARDS", 1));
    settings.poison = number("CARD_POISON", 0) != 0;
    settings.eager_copies = number("CARD_EAGER_COPIES", 0) != 0;
    settings.late = settings.execute && number("CARD_LATE", 0) != 0;
    settings.old_driver = number("CARD_OLD_DRIVER", 0) != 0;
    settings.lockstep = number("CARD_FREE_LANES", 0) == 0;
    settings.backwards = number("CARD_BACKWARDS", 0) != 0;
    settings.verbose = number("CARD_VERBOSE", 0) != 0;
    settings.trace = variable("CARD_TRACE");
    settings.headers = variable("CARD_HEADERS");
    settings.kernels = variable("CARD_KERNELS");
    if (settings.headers.empty() || settings.kernels.empty()) {
        fprintf(stderr, "card: the software card is started by worker/cuda/software-card/run\n");
        exit(1);
    }
    return settings;
}

}  // namespace

// Never destroyed: the report is written when the process exits.
const Settings& settings() {
    static const Settings* read = new Settings(read_settings());
    return *read;
}

}  // namespace card
