"""Sessions of the dashboard that were ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sign_outs",
        sa.Column("session_id", sa.Text, primary_key=True, nullable=False),
        sa.Column("expires_at_us", sa.BigInteger, nullable=False),
    )
