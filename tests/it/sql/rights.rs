//! Who may do what, and what nobody may.

use tokio_postgres::Client;

use super::{EFFECT, billing, code, one, refused, rows};
use crate::support::db::TestDb;

const PARTS: [&str; 4] = ["producer", "worker", "reader", "relay"];

/// A role for each part and one for nobody, named after the database: roles belong to the whole server.
struct Roles {
    db: TestDb,
    owner: Client,
}

impl Roles {
    async fn new() -> Self {
        let (db, owner) = billing().await;
        let roles = Self { db, owner };
        for part in PARTS.into_iter().chain(["nobody"]) {
            roles.owner.batch_execute(&format!("create role {}", roles.name(part))).await.unwrap();
        }
        for part in PARTS {
            roles
                .owner
                .batch_execute(&format!("select fencepost.grant_to('{}', '{part}')", roles.name(part)))
                .await
                .unwrap();
        }
        roles
    }

    fn name(&self, part: &str) -> String {
        format!("{}_{part}", self.db.name())
    }

    async fn client(&self, part: &str) -> Client {
        self.db.client_as(&self.name(part)).await
    }

    async fn drop(self) {
        for part in PARTS.into_iter().chain(["nobody"]) {
            let name = self.name(part);
            self.owner.batch_execute(&format!("drop owned by {name}; drop role {name}")).await.unwrap();
        }
    }
}

/// 42501: permission denied.
async fn denied(c: &Client, sql: &str) {
    let (state, message) = refused(c, sql).await;
    assert_eq!(state, "42501", "{sql}: {message}");
}

const CALLS: [(&str, &str); 16] = [
    ("producer relay", "select fencepost.cancel_task('x', 'r')"),
    ("producer relay", "select fencepost.reopen_task('x', 'r')"),
    ("producer", "select fencepost.submit_task('k')"),
    ("producer", "select fencepost.emit('[]')"),
    ("producer", "select fencepost.record_completion('t', 1, '[]')"),
    ("producer worker", "select fencepost.complete_task('x', 1, 'w', '[{}]')"),
    ("producer worker", "select fencepost.complete_task_no_action('x', 1, 'w', 'r')"),
    ("worker", "select fencepost.claim_tasks('w')"),
    ("worker", "select fencepost.heartbeat('x', 1, 'w')"),
    ("worker", "select fencepost.fail_task('x', 1, 'w', 'r')"),
    ("worker", "select fencepost.release_task('x', 1, 'w', 'r')"),
    ("relay", r#"select fencepost.declare_consumer('c', '{"kind": "amqp", "exchange": "x"}')"#),
    ("relay", "select fencepost.subscribe('t', 'billing')"),
    ("reader relay", "select count(*) from fencepost.deliveries"),
    ("reader relay", "select from fencepost.deliveries_of('t:1')"),
    ("relay", "select count(*) from fencepost.effects"),
];

#[tokio::test]
async fn each_part_may_do_its_own_and_nothing_else() {
    let roles = Roles::new().await;
    for part in PARTS.into_iter().chain(["nobody"]) {
        let c = roles.client(part).await;
        for (allowed, sql) in CALLS {
            if allowed.split(' ').any(|a| a == part) {
                if let Err(error) = c.simple_query(sql).await {
                    let state = error.as_db_error().unwrap().code().code().to_string();
                    assert!(state.starts_with("OB"), "{part}: {sql}: {error:?}");
                }
            } else {
                denied(&c, sql).await;
            }
        }
        denied(&c, "select fencepost.grant_to('postgres', 'producer')").await;
        denied(&c, &format!("select fencepost.store_effects('t', 1, '{EFFECT}', '{{1}}')")).await;
        denied(&c, "create table fencepost.mine (id int)").await;
        denied(&c, "drop table fencepost.effects_0").await;
        denied(&c, "alter table fencepost.effects disable trigger all").await;
    }
    roles.drop().await;
}

#[tokio::test]
async fn no_part_touches_a_table_beyond_its_rights() {
    let roles = Roles::new().await;
    let tables = rows(&roles.owner, "select oid::regclass from pg_class where relnamespace = 'fencepost'::regnamespace and relkind in ('r', 'p', 'v') order by 1").await;
    assert!(tables.len() > 20, "{tables:?}");
    for part in PARTS.into_iter().chain(["nobody"]) {
        let held = format!(
            "select privilege_type from pg_class c, aclexplode(c.relacl) a where c.oid = $1::regclass and a.grantee = '{}'::regrole order by 1",
            roles.name(part)
        );
        for table in &tables {
            let held = rows(&roles.owner, &held.replace("$1", &format!("'{table}'"))).await;
            let stable = ["fencepost.completions", "fencepost.intended", "fencepost.deliveries", "fencepost.workers"]
                .contains(&table.as_str());
            match part {
                "reader" if stable => assert_eq!(held, ["SELECT"], "{table}"),
                "relay" => {
                    assert!(held.contains(&"SELECT".into()) && !held.contains(&"TRUNCATE".into()), "{table}: {held:?}");
                    if table.starts_with("fencepost.effects") && !table.ends_with("kept")
                        || table.starts_with("fencepost.ledger")
                    {
                        let expected: &[_] =
                            if table == "fencepost.ledger" { &["INSERT", "SELECT"] } else { &["SELECT"] };
                        assert_eq!(held, expected, "{table}");
                    }
                }
                _ => assert!(held.is_empty(), "{part}, {table}: {held:?}"),
            }
        }
    }
    // And to be sure, by trying.
    for part in ["producer", "worker", "reader", "nobody"] {
        let c = roles.client(part).await;
        for sql in [
            "insert into fencepost.tasks (task_id, kind, claims_left) values ('t', 'k', 1)",
            "select payload from fencepost.effects_0",
            "update fencepost.tasks set owner = 'me'",
            "delete from fencepost.ledger_0",
            "truncate fencepost.effects_0",
            "select nextval('fencepost.effects_id_seq')",
            "select value from fencepost.settings",
        ] {
            denied(&c, sql).await;
        }
    }
    let relay = roles.client("relay").await;
    for sql in [
        "update fencepost.effects set payload = ''",
        "delete from fencepost.ledger",
        "truncate fencepost.ledger_0",
        "update fencepost.tasks set owner = 'me'",
        "insert into fencepost.effects_0 default values",
    ] {
        denied(&relay, sql).await;
    }
    roles.drop().await;
}

#[tokio::test]
async fn the_log_refuses_changes_to_its_owner_too() {
    let (_db, c) = billing().await;
    c.batch_execute(&format!(
        "select fencepost.emit('{EFFECT}', 't'); select fencepost.emit('[{{\"topic\": \"nobody\", \"payload\": 1}}]', 'u')"
    ))
    .await
    .unwrap();
    // A third segment each, split off as retention does it.
    for parent in ["effects", "ledger"] {
        c.batch_execute(&format!(
            "alter table fencepost.{parent} detach partition fencepost.{parent}_68719476736 concurrently"
        ))
        .await
        .unwrap();
        c.batch_execute(&format!("select fencepost.attach_segment('{parent}', 68719476736)")).await.unwrap();
    }
    let relations = rows(
        &c,
        "select oid::regclass from pg_class where relnamespace = 'fencepost'::regnamespace and relkind in ('r', 'p') and relname ~ '^(effects|ledger)(_kept)?(_[0-9]+)?$' and relname <> 'effects_kept' order by oid",
    )
    .await;
    assert_eq!(
        relations,
        [
            "fencepost.effects",
            "fencepost.ledger",
            "fencepost.effects_0",
            "fencepost.effects_68719476736",
            "fencepost.ledger_0",
            "fencepost.ledger_68719476736",
            "fencepost.ledger_kept_0",
            "fencepost.effects_137438953472",
            "fencepost.ledger_137438953472",
        ]
    );
    for relation in relations {
        let column = if relation.contains("ledger") { "attempt" } else { "size" };
        for sql in [
            format!("update {relation} set {column} = {column}"),
            format!("update {relation} set {column} = {column} where false"),
            format!("delete from {relation}"),
            format!("truncate {relation}"),
            format!("truncate {relation} cascade"),
        ] {
            assert_eq!(code(&c, &sql).await, "OB008", "{sql}");
        }
    }
    assert_eq!(
        one(&c, "select (select count(*) from fencepost.effects), (select count(*) from fencepost.ledger)").await,
        "2|1"
    );
}

#[tokio::test]
async fn nothing_is_granted_to_public() {
    let (_db, c) = billing().await;
    let public = "select p.oid::regprocedure from pg_proc p left join lateral aclexplode(p.proacl) a on true
                  where p.pronamespace = 'fencepost'::regnamespace and (p.proacl is null or a.grantee = 0)";
    assert_eq!(rows(&c, public).await, Vec::<String>::new());
    let public = "select c.oid::regclass from pg_class c, aclexplode(c.relacl) a where c.relnamespace = 'fencepost'::regnamespace and a.grantee = 0";
    assert_eq!(rows(&c, public).await, Vec::<String>::new());
    assert_eq!(one(&c, "select count(*) from pg_namespace n, aclexplode(n.nspacl) a where n.nspname = 'fencepost' and a.grantee = 0").await, "0");
}

#[tokio::test]
async fn every_public_function_has_its_definer_s_rights_and_a_fixed_search_path() {
    let (_db, c) = billing().await;
    let sql = "select proname from pg_proc where pronamespace = 'fencepost'::regnamespace and prosecdef and 'search_path=pg_catalog, pg_temp' = any (proconfig) order by 1";
    assert_eq!(
        rows(&c, sql).await,
        [
            "cancel_task",
            "claim_tasks",
            "complete_task",
            "complete_task_no_action",
            "declare_consumer",
            "deliveries_of",
            "effect_id_of",
            "emit",
            "fail_task",
            "grant_to",
            "heartbeat",
            "read_limits",
            "record_completion",
            "release_task",
            "reopen_task",
            "submit_task",
            "subscribe",
            "worker_failed"
        ]
    );
    assert_eq!(
        one(&c, "select count(*) from pg_proc where pronamespace = 'fencepost'::regnamespace and prosecdef").await,
        "18"
    );
}

/// A producer that puts its own tables and functions in front gains nothing.
#[tokio::test]
async fn shadow_objects_are_not_found() {
    let roles = Roles::new().await;
    let name = roles.name("producer");
    roles.owner.batch_execute(&format!("create schema evil authorization {name}")).await.unwrap();
    let c = roles.client("producer").await;
    c.batch_execute(
        "create temp table tasks (task_id text); create temp table consumers (consumer_id int, name text, retired_at timestamptz); create temp table effects (id bigint);
         create function evil.octet_length(text) returns int language plpgsql as $$ begin raise 'evil'; end $$;
         create function evil.octet_length(bytea) returns int language plpgsql as $$ begin raise 'evil'; end $$;
         create function evil.sha256(bytea) returns bytea language plpgsql as $$ begin raise 'evil'; end $$;
         create function evil.convert_to(text, name) returns bytea language plpgsql as $$ begin raise 'evil'; end $$;
         create function evil.clock_timestamp() returns timestamptz language plpgsql as $$ begin raise 'evil'; end $$;
         create function evil.text_ne(text, text) returns boolean language plpgsql as $$ begin raise 'evil'; end $$;
         create operator evil.<> (leftarg = text, rightarg = text, function = evil.text_ne);
         set search_path = evil, pg_temp, pg_catalog, fencepost",
    )
    .await
    .unwrap();
    let (_, message) = refused(&c, "select octet_length('x'::text)").await;
    assert_eq!(message, "evil", "the trap is set");
    c.batch_execute(&format!("select fencepost.submit_task('k', '{{}}', 't'), fencepost.emit('{EFFECT}', 'e')"))
        .await
        .unwrap();
    assert_eq!(
        one(&c, "select (select count(*) from pg_temp.tasks) + (select count(*) from pg_temp.effects)").await,
        "0"
    );
    assert_eq!(rows(&roles.owner, "select key, consumer from fencepost.intended").await, ["e:1|billing"]);
    drop(c);
    roles.owner.batch_execute("drop schema evil cascade").await.unwrap();
    roles.drop().await;
}

#[tokio::test]
async fn grants_name_a_known_part_and_quote_the_role() {
    let (db, c) = billing().await;
    assert_eq!(code(&c, "select fencepost.grant_to('postgres', 'admin')").await, "22023");
    assert_eq!(code(&c, "select fencepost.grant_to('postgres', null)").await, "22023");
    assert_eq!(code(&c, &format!("select fencepost.grant_to('{}_missing', 'reader')", db.name())).await, "42704");
    let odd = format!("{} \"odd\"", db.name());
    let quoted = odd.replace('"', "\"\"");
    c.batch_execute(&format!("create role \"{quoted}\"; select fencepost.grant_to('{odd}', 'producer'), fencepost.grant_to('{odd}', 'producer')")).await.unwrap();
    assert_eq!(
        one(&c, &format!("select has_function_privilege('{odd}', 'fencepost.emit(jsonb, text)', 'execute')")).await,
        "t"
    );
    c.batch_execute(&format!("drop owned by \"{quoted}\"; drop role \"{quoted}\"")).await.unwrap();
}
