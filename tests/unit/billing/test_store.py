from __future__ import annotations

import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, func, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import IntegrityError, ProgrammingError
from sqlalchemy.schema import CreateTable

from billing import batch_schema, money_schema, schema
from billing.bulk import ROWS_PER_STATEMENT
from billing.config import BillingConfig
from billing.dialect import PostgresDialect, dialect_named
from billing.migrate import known_revisions, migrations_config
from billing.rates import RateBook
from billing.store import PostResult, Store, StoreAwayError, StoreError
from billing.usage import UsageRecord
from tests.support.ledger import (
    NOON_US,
    book,
    card,
    drop_guards,
    groups_of,
    open_store,
    opened,
    record,
    records,
)


def stored(store: Store) -> list[UsageRecord]:
    with store.reading() as connection:
        rows = connection.execute(select(schema.usage_records).order_by(schema.usage_records.c.request_id))
        return [UsageRecord(**row._mapping) for row in rows]


def counts(store: Store) -> tuple[int, int, int]:
    """Usage records, transactions, entries."""
    with store.reading() as connection:
        found = [
            connection.scalar(select(func.count()).select_from(table)) or 0
            for table in (schema.usage_records, schema.ledger_transactions, schema.ledger_entries)
        ]
    return found[0], found[1], found[2]


class TestPost:
    def test_a_record_comes_back_as_it_was(self, store: Store, rate_book: RateBook) -> None:
        given = sorted(records(300), key=lambda one: one.request_id)
        assert store.post(given, rate_book) == PostResult(300, 0, 0)
        assert stored(store) == given
        assert counts(store) == (300, 300, 600)

    def test_the_transaction_holds_the_charge(self, store: Store, rate_book: RateBook) -> None:
        store.post([record()], rate_book)
        with store.reading() as connection:
            row = connection.execute(select(schema.ledger_transactions)).one()
            legs = list(
                connection.execute(select(schema.ledger_entries).order_by(schema.ledger_entries.c.leg))
            )
        assert row._asdict() == {
            "id": "request-000000",
            "kind": "charge",
            "occurred_at_us": NOON_US,
            "posted_at_us": NOON_US,
            "input_nanos": 120_000,
            "cached_input_nanos": 80_000,
            "output_nanos": 150_000,
            "amount_nanos": 350_000,
            "undiscounted_nanos": 750_000,
            "neurons_e4": 318_182,
            "rate_card_version": "2026-01-01 600000/100000/3000000",
            "free_nanos": 0,
        }
        assert [leg.amount_nanos for leg in legs] == [350_000, -350_000]

    def test_posting_again_changes_nothing(self, store: Store, rate_book: RateBook) -> None:
        given = records(150)
        store.post(given[:100], rate_book)
        assert store.post(given, rate_book) == PostResult(50, 100, 0)
        assert store.post(given, rate_book) == PostResult(0, 150, 0)
        assert counts(store) == (150, 150, 300)

    def test_the_first_record_of_an_id_stands(self, store: Store, rate_book: RateBook) -> None:
        store.post([record()], rate_book)
        assert store.post([record(completion_tokens=9_999)], book(card(output="9"))) == PostResult(0, 1, 0)
        assert stored(store) == [record()]

    def test_twice_in_one_batch_is_once(self, store: Store, rate_book: RateBook) -> None:
        many = [record(number % 100) for number in range(3 * ROWS_PER_STATEMENT)]
        assert store.post(many, rate_book).num_posted == 100
        assert counts(store) == (100, 100, 200)

    def test_nothing_is_nothing(self, store: Store, rate_book: RateBook) -> None:
        assert store.post([], rate_book) == PostResult(0, 0, 0)

    def test_a_record_without_a_card_is_kept_and_counted(self, store: Store, rate_book: RateBook) -> None:
        assert store.post([record(model="@cf/unknown"), record(1)], rate_book) == PostResult(2, 0, 1)
        assert counts(store) == (2, 2, 4)

    def test_threads_that_post_the_same_post_it_once(self, store: Store, rate_book: RateBook) -> None:
        given = records(200)
        barrier = threading.Barrier(4)

        def post(_: int) -> int:
            barrier.wait()
            return sum(store.post(group, rate_book).num_posted for group in groups_of(given, 17))

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(post, range(4))) == 200
        assert counts(store) == (200, 200, 400)

    def test_has_record_names_those_that_are_there(self, store: Store, rate_book: RateBook) -> None:
        store.post([record(1), record(2)], rate_book)
        assert store.has_record({"request-000002", "request-000003"}) == {"request-000002"}
        assert store.has_record([]) == set()
        assert len(store.has_record([f"request-{number:06d}" for number in range(2_000)])) == 2


class TestImmutability:
    @pytest.mark.parametrize("table", schema.APPEND_ONLY)
    @pytest.mark.parametrize("statement", ["DELETE FROM {table}", "UPDATE {table} SET {column} = {column}"])
    def test_rows_can_be_neither_changed_nor_deleted(
        self, store: Store, rate_book: RateBook, table: str, statement: str
    ) -> None:
        store.post([record()], rate_book)
        column = schema.metadata.tables[table].c[0].name
        with pytest.raises(IntegrityError, match=f"{table} is append-only"), store.writing() as connection:
            connection.execute(text(statement.format(table=table, column=column)))
        assert counts(store) == (1, 1, 2)

    def test_a_failure_in_the_middle_leaves_nothing(self, store: Store, rate_book: RateBook) -> None:
        with store.writing() as connection:
            drop_guards(connection, "ledger_entries")
            connection.execute(text("ALTER TABLE ledger_entries RENAME TO away"))
        with pytest.raises((StoreError, ProgrammingError), match="ledger_entries"):
            store.post([record()], rate_book)
        assert store.has_record(["request-000000"]) == set()


class TestOpen:
    def test_migrates_an_empty_database_to_what_the_code_expects(self, store: Store) -> None:
        with store.reading() as connection:
            assert batch_schema.metadata is money_schema.metadata is schema.metadata
            differences = compare_metadata(MigrationContext.configure(connection), schema.metadata)
        assert differences == []

    def test_a_database_of_the_first_version_keeps_its_records(self, blank_url: str) -> None:
        engine = create_engine(blank_url)
        with engine.begin() as connection:
            config = migrations_config()
            config.attributes["connection"] = connection
            command.upgrade(config, "0001")
            connection.execute(
                text(
                    "INSERT INTO usage_records VALUES ('old', 'a', 't', 'm', 'm', 'run', 'r', 's', "
                    "1, 2, 10, 4, 2, 0, 'ok', FALSE, 0, 1)"
                )
            )
        engine.dispose()
        store = Store.open(blank_url)
        (found,) = stored(store)
        store.close()
        assert (found.request_id, found.free_neurons_e4, found.cache_head) == ("old", 0, "")

    def test_head_is_the_newest_migration(self) -> None:
        assert known_revisions()[0] == schema.HEAD_REVISION

    def test_usage_records_mirror_the_struct(self) -> None:
        assert schema.usage_records.c.keys() == list(UsageRecord.__struct_fields__)

    def test_opening_again_keeps_everything(self, ledger_url: str, rate_book: RateBook) -> None:
        with opened(ledger_url) as store:
            store.post(records(10), rate_book)
        with opened(ledger_url) as store:
            assert counts(store) == (10, 10, 20)

    def test_two_at_once_migrate_once(self, blank_url: str) -> None:
        with ThreadPoolExecutor(4) as pool:
            for store in list(pool.map(lambda _: Store.open(blank_url), range(4))):
                assert counts(store) == (0, 0, 0)
                store.close()

    def test_the_file_is_private_and_flushed_on_commit(self, tmp_path: Path) -> None:
        with open_store(tmp_path) as store, store.reading() as connection:
            for path in tmp_path.glob("ledger.db*"):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
            assert connection.scalar(text("PRAGMA synchronous")) == 2

    def test_a_newer_database_is_refused(self, ledger_url: str) -> None:
        with opened(ledger_url) as store, store.writing() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        with pytest.raises(StoreError, match=r"written by a newer version .*9999"):
            Store.open(ledger_url)

    @pytest.mark.parametrize(
        ("url", "problem"),
        [
            ("nonsense", "Could not parse"),
            ("mysql://h/db", "'mysql' is not supported; use sqlite or postgresql"),
            ("sqlite:////proc/none/ledger.db", "No such file or directory"),
            ("postgresql+psycopg://me:hunter2@127.0.0.1:1/db", r"me:\*\*\*@127.0.0.1:1/db failed: .*refused"),
            ("postgresql+psycopg://127.0.0.1/db?sslmode=perhaps", "invalid sslmode value"),
        ],
    )
    def test_a_bad_url_is_one_sentence(self, url: str, problem: str) -> None:
        with pytest.raises(StoreError, match=problem):
            Store.open(url)

    def test_a_password_is_never_shown(self) -> None:
        with pytest.raises(StoreError) as caught:
            Store.open("mysql://user:hunter2@host/db")
        assert "hunter2" not in str(caught.value)

    def test_a_file_that_is_no_database_is_said_so(self, tmp_path: Path) -> None:
        (tmp_path / "ledger.db").write_text("this is text, and long enough to be read as a header " * 10)
        with pytest.raises(StoreError, match="file is not a database"):
            Store.open(f"sqlite:///{tmp_path / 'ledger.db'}")

    def test_a_database_that_is_away_may_come_later(self, tmp_path: Path, rate_book: RateBook) -> None:
        path = tmp_path / "ledger.db"
        path.mkdir()  # in the way: nothing can be opened there
        store = Store.open(f"sqlite:///{path}", may_be_away=True)
        assert not store.is_current
        with pytest.raises(StoreAwayError, match="unable to open"):
            store.post([record()], rate_book)
        path.rmdir()
        assert store.post([record()], rate_book) == PostResult(1, 0, 0)
        assert store.is_current
        store.close()

    def test_waiting_does_not_mend_a_newer_database(self, tmp_path: Path) -> None:
        with open_store(tmp_path) as store, store.writing() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        with pytest.raises(StoreError, match="written by a newer version"):
            Store.open(f"sqlite:///{tmp_path / 'ledger.db'}", may_be_away=True)

    def test_the_configured_flushing_is_used(self, tmp_path: Path) -> None:
        store = Store.of_config(BillingConfig(sqlite_synchronous="normal"), tmp_path)
        with store.reading() as connection:
            assert connection.scalar(text("PRAGMA synchronous")) == 1
        store.close()

    def test_a_reader_sees_one_state(self, store: Store, rate_book: RateBook) -> None:
        query = select(func.count()).select_from(schema.usage_records)
        with store.reading() as connection:
            assert connection.scalar(query) == 0
            store.post([record()], rate_book)
            assert connection.scalar(query) == 0
        assert counts(store)[0] == 1


class TestPostgres:
    """What would be sent to a server, compiled and looked at without one."""

    def test_inserts_are_portable(self) -> None:
        for table in (schema.usage_records, schema.ledger_transactions, schema.ledger_entries):
            dialect = postgresql.dialect(paramstyle="format")  # type: ignore[no-untyped-call]
            compiled = PostgresDialect().insert_or_skip(table).compile(dialect=dialect)
            assert str(compiled).endswith("ON CONFLICT DO NOTHING")
            assert compiled.positiontup == table.c.keys()

    def test_tables_are_portable(self) -> None:
        for table in batch_schema.metadata.sorted_tables:
            ddl = str(CreateTable(table).compile(dialect=postgresql.dialect()))  # type: ignore[no-untyped-call]
            assert "ROWID" not in ddl
            assert "BIGINT" in ddl or table.name == "ledger_entries"

    def test_tables_are_guarded(self) -> None:
        statements = dialect_named("postgresql").append_only("usage_records")
        assert "BEFORE UPDATE OR DELETE OR TRUNCATE ON usage_records" in statements[1]


def test_large_amounts_fit(store: Store) -> None:
    dearest = book(card(input="1000000", cached_input="1000000", output="1000000"))
    most = record(prompt_tokens=2**31 - 1, cached_prompt_tokens=2**30, completion_tokens=2**31 - 1)
    store.post([most], dearest)
    with store.reading() as connection:
        amount = connection.scalar(select(schema.ledger_transactions.c.amount_nanos))
    assert amount == 2 * (2**31 - 1) * 10**9
