//! Structured fields, RFC 8941: just enough to read one item with its parameters, strictly.

/// A bare item. Kinds that no header of ours uses are read (they may stand in parameters we ignore) and not kept.
#[derive(Clone, Debug, PartialEq)]
pub enum Bare {
    Token(String),
    String(String),
    Integer(i64),
    Other,
}

/// An item: a bare item and its parameters. Of a parameter given twice the last stands (RFC 8941, 3.1.2).
#[derive(Clone, Debug, PartialEq)]
pub struct Item {
    pub value: Bare,
    pub params: Vec<(String, Bare)>,
}

impl Item {
    pub fn param(&self, name: &str) -> Option<&Bare> {
        self.params.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// Parses a whole header value (RFC 8941, 4.2). `None`: it is not one item.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let mut input = Input(text);
        input.spaces();
        let value = input.bare()?;
        let mut params = Vec::new();
        while input.take(b';') {
            input.spaces();
            let key = input.key()?;
            let value = if input.take(b'=') { input.bare()? } else { Bare::Other };
            params.push((key, value));
        }
        input.spaces();
        input.0.is_empty().then_some(Self { value, params })
    }
}

struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn peek(&self) -> Option<u8> {
        self.0.first().copied()
    }

    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        if found {
            self.0 = &self.0[1..];
        }
        found
    }

    fn spaces(&mut self) {
        while self.take(b' ') {}
    }

    fn run(&mut self, member: impl Fn(u8) -> bool) -> String {
        let end = self.0.iter().position(|b| !member(*b)).unwrap_or(self.0.len());
        let (run, rest) = self.0.split_at(end);
        self.0 = rest;
        String::from_utf8_lossy(run).into_owned()
    }

    fn key(&mut self) -> Option<String> {
        self.peek().filter(|b| b.is_ascii_lowercase() || *b == b'*')?;
        Some(self.run(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_-.*".contains(&b)))
    }

    fn bare(&mut self) -> Option<Bare> {
        match self.peek()? {
            b'"' => self.string(),
            b'-' | b'0'..=b'9' => self.number(),
            b'*' | b'a'..=b'z' | b'A'..=b'Z' => {
                Some(Bare::Token(self.run(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~:/".contains(&b))))
            }
            b':' => {
                self.next();
                self.run(|b| b.is_ascii_alphanumeric() || b"+/=".contains(&b));
                self.take(b':').then_some(Bare::Other)
            }
            b'?' => {
                self.next();
                (self.take(b'0') || self.take(b'1')).then_some(Bare::Other)
            }
            _ => None,
        }
    }

    fn string(&mut self) -> Option<Bare> {
        self.next();
        let mut text = String::new();
        loop {
            match self.next()? {
                b'"' => return Some(Bare::String(text)),
                b'\\' => text.push(self.next().filter(|b| b"\"\\".contains(b))?.into()),
                byte @ 0x20..=0x7e => text.push(byte.into()),
                _ => return None,
            }
        }
    }

    /// An integer of up to 15 digits, or a decimal of up to 12 and 3.
    fn number(&mut self) -> Option<Bare> {
        let negative = self.take(b'-');
        let digits = self.run(|b| b.is_ascii_digit());
        if self.take(b'.') {
            let fraction = self.run(|b| b.is_ascii_digit());
            let fits = (1..=12).contains(&digits.len()) && (1..=3).contains(&fraction.len());
            return fits.then_some(Bare::Other);
        }
        if digits.len() > 15 {
            return None;
        }
        let number: i64 = digits.parse().ok()?;
        Some(Bare::Integer(if negative { -number } else { number }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn items_with_parameters() {
        let item = Item::parse(br#" stale; key="a:1";current=-5; a;b=?1;c=1.5;d=:aGk=:;e=*x/y;f="\"\\" "#).unwrap();
        assert_eq!(item.value, Bare::Token("stale".into()));
        assert_eq!(item.param("key"), Some(&Bare::String("a:1".into())));
        assert_eq!(item.param("current"), Some(&Bare::Integer(-5)));
        assert_eq!(item.param("e"), Some(&Bare::Token("*x/y".into())));
        assert_eq!(item.param("f"), Some(&Bare::String("\"\\".into())));
        assert_eq!(item.params.len(), 8);
        assert_eq!(Item::parse(b"a;x=1;x=2").unwrap().param("x"), Some(&Bare::Integer(2)));
    }

    #[test]
    fn what_is_not_one_item() {
        for bad in [
            "",
            " ",
            ";a=1",
            "a, b",
            "a b",
            "a ;b",
            "a;",
            "a;=1",
            "a;B=1",
            "a;b=",
            "a;b=\"",
            "a;b=\"\\x\"",
            "a;b=-",
            "a;b=1.",
            "a;b=1.2345",
            "a;b=1234567890123456",
            "a;b=?2",
            "a;b=:x",
            "a\tb",
            "(a b)",
            "\u{fc}",
            "a;b=\"\u{fc}\"",
            "a;\tb=1",
        ] {
            assert_eq!(Item::parse(bad.as_bytes()), None, "{bad:?} was taken");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Item::parse(&bytes);
        }

        #[test]
        fn strings_come_back(text in "[ -~]{0,32}") {
            let quoted = text.replace('\\', "\\\\").replace('"', "\\\"");
            let item = Item::parse(format!("t;s=\"{quoted}\"").as_bytes()).unwrap();
            prop_assert_eq!(item.param("s"), Some(&Bare::String(text)));
        }
    }
}
