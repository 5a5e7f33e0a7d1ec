//! How many lines of production code a file has: no blank lines, no comments, nothing that is for tests
//! alone.

/// Lines of code in a file that rustfmt has laid out.
pub fn count(text: &str) -> usize {
    let mut lines = text.lines();
    let mut count = 0;
    while let Some(line) = lines.next() {
        let code = line.trim_start();
        if code.starts_with("#[cfg(test)]") || code.starts_with("#[cfg(all(test,") {
            let indent = &line[..line.len() - code.len()];
            let ends = |line: &&str| {
                line.strip_prefix(indent).is_some_and(|rest| {
                    let begins = rest.starts_with(|first: char| !first.is_whitespace() && first != '#');
                    begins && (rest.ends_with('}') || rest.ends_with(';') || rest.ends_with(','))
                })
            };
            lines.find(ends);
        } else if !code.is_empty() && !code.starts_with("//") {
            count += 1;
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_and_comments_do_not_count() {
        let text = "//! A file.\n\nuse a::{\n    b,\n};\n\n/// A function.\nfn f() {\n    // Why.\n    g();\n}\n\n\
                    #[cfg(test)]\n#[path = \"x.rs\"]\nmod tests {\n    fn h() {}\n}\n\n#[cfg(test)]\nmod more;\n\n\
                    impl S {\n    #[cfg(test)]\n    fn only_here(&self) {\n        g();\n    }\n\n    fn k() {}\n}\n";
        assert_eq!(count(text), 9);
    }
}
