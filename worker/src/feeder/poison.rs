//! A sample that ends the process that reads it, for tests of what happens then.
//!
//! `COX_FAULT_SAMPLE="index=123 how=stack"` exhausts the stack of the thread that reads sample 123 of the
//! data set (SIGSEGV, then SIGABRT); `how=abort` aborts, as a refused allocation does. It is part of the
//! program because the program is what is tested, as `COX_FAULT_LOSS` is.

use std::{hint::black_box, sync::LazyLock};

const VARIABLE: &str = "COX_FAULT_SAMPLE";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CrashKind {
    Stack,
    Abort,
}

static POISON: LazyLock<Option<(u64, CrashKind)>> = LazyLock::new(|| {
    let text = std::env::var(VARIABLE).ok().filter(|text| !text.is_empty())?;
    let poison = parse(&text);
    if poison.is_none() {
        tracing::error!("{VARIABLE}={text:?} is ignored: write `index=123 how=stack`");
    }
    poison
});

/// Ends the process if this sample is the one.
pub(super) fn taste(index: u64) {
    match *POISON {
        Some((poison, CrashKind::Abort)) if poison == index => std::process::abort(),
        Some((poison, CrashKind::Stack)) if poison == index => {
            black_box(exhaust(black_box(u64::MAX)));
        }
        _ => {}
    }
}

/// Calls itself so often that no stack has room for it.
fn exhaust(calls: u64) -> u64 {
    let filling = black_box([calls; 64]);
    if calls == 0 { 0 } else { exhaust(calls - 1).wrapping_add(filling[0]) }
}

fn parse(text: &str) -> Option<(u64, CrashKind)> {
    let field =
        |name: &str| text.split_whitespace().find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
    let how = match field("how")? {
        "stack" => CrashKind::Stack,
        "abort" => CrashKind::Abort,
        _ => return None,
    };
    Some((field("index")?.parse().ok()?, how))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_poison_names_a_sample_and_a_way() {
        assert_eq!(parse("how=stack index=7"), Some((7, CrashKind::Stack)));
        assert_eq!(parse("index=7 how=abort"), Some((7, CrashKind::Abort)));
        assert_eq!(parse("index=7"), None);
    }
}
