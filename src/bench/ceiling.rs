//! A ceiling is measured before and after what it is compared with. Where the two differ by more than a third, the
//! machine was busy with something else, and nothing measured between them says anything.

/// The same thing measured before and after.
#[derive(Clone, Copy, Debug)]
pub struct Ceiling {
    pub before: f64,
    pub after: f64,
}

const MOST: f64 = 4.0 / 3.0;

impl Ceiling {
    /// Their mean, or why there is none.
    pub fn steady(self) -> Result<f64, String> {
        let (low, high) = (self.before.min(self.after), self.before.max(self.after));
        if low > 0.0 && high / low <= MOST {
            return Ok((low + high) / 2.0);
        }
        Err(format!("its ceiling varied from {:.1} to {:.1}, by more than a third", self.before, self.after))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ceiling_that_varies_by_more_than_a_third_is_none() {
        assert_eq!(Ceiling { before: 90.0, after: 110.0 }.steady(), Ok(100.0));
        assert!(Ceiling { before: 100.0, after: 133.0 }.steady().is_ok());
        assert!(Ceiling { before: 135.0, after: 100.0 }.steady().is_err());
        assert!(Ceiling { before: 0.0, after: 0.0 }.steady().is_err());
    }
}
