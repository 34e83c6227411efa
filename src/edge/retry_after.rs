//! `Retry-After` (RFC 9110, 10.2.3): seconds, or a date.

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use http::header::{DATE, RETRY_AFTER};

/// How long the consumer asks to be left alone, uncapped. A date is taken relative to the answer's own `Date`, else to
/// `now`, the database's clock. What is negative, past or unreadable asks for nothing.
pub fn read(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        // More digits than a u32 holds mean "very long"; the relay caps it.
        let seconds = text.parse::<u32>().unwrap_or(u32::MAX);
        return Some(Duration::from_secs(seconds.into()));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    let sent = headers.get(DATE).and_then(|value| httpdate::parse_http_date(value.to_str().ok()?).ok());
    date.duration_since(sent.unwrap_or(now)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    fn read_with(retry_after: &str, date: Option<&str>) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, retry_after.parse().unwrap());
        if let Some(date) = date {
            headers.insert(DATE, date.parse().unwrap());
        }
        read(&headers, UNIX_EPOCH + Duration::from_secs(784_111_777)) // Sun, 06 Nov 1994 08:49:37 GMT
    }

    #[test]
    fn seconds_and_dates() {
        let seconds = |n| Some(Duration::from_secs(n));
        assert_eq!(read_with("120", None), seconds(120));
        assert_eq!(read_with("0", None), seconds(0));
        assert_eq!(read_with("99999999999999999999", None), seconds(u32::MAX.into()));
        assert_eq!(read_with("Sun, 06 Nov 1994 08:50:37 GMT", None), seconds(60));
        assert_eq!(read_with("Sun, 06 Nov 1994 08:50:37 GMT", Some("Sun, 06 Nov 1994 08:50:07 GMT")), seconds(30));
        assert_eq!(read_with("Sun, 06 Nov 1994 08:50:37 GMT", Some("soon")), seconds(60));
    }

    #[test]
    fn what_asks_for_nothing() {
        for text in ["-1", "1.5", "", "soon", "1 2", "+5", "0x10", "Sun, 06 Nov 1994 08:49:36 GMT"] {
            assert_eq!(read_with(text, None), None, "{text:?}");
        }
        assert_eq!(read(&HeaderMap::new(), UNIX_EPOCH), None);
    }
}
